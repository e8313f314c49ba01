"""Plans at work: on the user's model, or in memory that was planned ahead."""
