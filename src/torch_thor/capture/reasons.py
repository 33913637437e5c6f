"""Why parameters are not preconditioned, in the words that users read."""

LEFT_OUT = "left out by layers="
NOT_TRAINED = "in no parameter group of this optimizer: not trained"
NORM = "a normalisation layer"
NO_REAL_NUMBERS = "{} is not a real floating-point type"
COMPUTES = "{!r} is computed from it (pruned, weight_norm): its gradient is not the weight's"
PARAMETRISES = (
    "the weight is computed from it (a parametrization): its gradient is not the weight's"
)
SHARED = "shared by {}"
TIED = "the weight of its layer is preconditioned as the weight of {!r}, with another G"
INPUTS_ARE_ROWS = "divided among processes, and the rows of the weight are inputs"
DIAGONAL = "the input factor is diagonal"
# of biases
G_DIFFERS = "G of {} does not apply to its bias"
NO_MATRIX = "no matrix"
NO_INPUTS = "it has no A"
WITHOUT_WEIGHT = "the weight of its layer is not preconditioned"
# of what belongs to no layer
NO_LAYER_INSIDE = "belongs to no layer inside {}"
NEITHER = "not the weight or bias of {}"
