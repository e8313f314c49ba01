"""Words and numbers as people read them, and documents as programs do."""
