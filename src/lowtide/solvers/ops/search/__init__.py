"""The search behind `evict` and `auto`."""
