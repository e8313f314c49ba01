"""Where lowtide relies on what PyTorch does not promise."""
