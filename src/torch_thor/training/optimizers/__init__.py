"""The optimizers that a recipe can name, with their settings."""
