"""The keys of a recipe, how a recipe is read, and how a run stores it."""
