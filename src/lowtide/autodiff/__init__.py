"""Reverse-mode differentiation that extends a graph, and expressions to make small graphs from."""
