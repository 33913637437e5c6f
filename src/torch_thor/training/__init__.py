"""The training application: recipes, data, models, the loop, checkpoints, evaluation and reports."""
