"""Methods for captured graphs, op by op."""
