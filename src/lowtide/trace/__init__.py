"""The dry run: any training step, followed on fake tensors."""
