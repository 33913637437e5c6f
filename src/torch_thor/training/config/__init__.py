"""What a recipe may say, how it is read, and how a run keeps it."""
