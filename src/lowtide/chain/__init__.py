"""A model as layers in a row: where it can be cut, what a plan recomputes, and what that does."""
