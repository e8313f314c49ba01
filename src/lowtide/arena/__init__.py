"""Where in one piece of memory each value of a step lives."""
