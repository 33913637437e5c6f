"""The training application: recipes, data, models, loop, checkpoints, evaluation and reports."""
