"""From a model and a budget to a plan that has been tried out."""
