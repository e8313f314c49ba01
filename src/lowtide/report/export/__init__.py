"""What was found, as data for other viewers."""
