"""A training run for real, and what it would have held on a card."""
