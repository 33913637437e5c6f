"""The training application: recipes, data, models, the training loop, checkpoints, evaluation and reports."""
