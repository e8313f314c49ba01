"""The one intermediate representation of a training step, and the referee that replays it."""
