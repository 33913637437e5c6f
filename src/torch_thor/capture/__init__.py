"""How activations and output gradients reach the curvature: what a model holds, which layers are taken, the hooks."""
