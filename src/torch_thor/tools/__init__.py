"""Tools beside the training: the split dimension of a model, and the plan for many devices."""
