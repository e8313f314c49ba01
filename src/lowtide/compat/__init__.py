"""Where lowtide relies on what PyTorch does not promise.

Private names are used here alone. Each module lists those that it uses (`PRIVATE`), and gives the rest of
lowtide functions and names of its own in their place. `patches` is the one way to replace foreign code.
"""
