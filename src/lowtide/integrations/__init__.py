"""Trainers of other libraries, whose steps lowtide keeps within a budget; one module for each of them."""
