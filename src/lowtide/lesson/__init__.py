"""A graph's memory as one teaches it."""
