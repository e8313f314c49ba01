"""Models by the words a user writes, wherever they come from."""
