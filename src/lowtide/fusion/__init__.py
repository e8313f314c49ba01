"""Kernels: which ops of a graph a compiler makes one kernel of, and what of them is ever in memory."""
