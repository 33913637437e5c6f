"""The networks that a recipe can name."""
