"""THOR, slow and obvious, in float64: the oracle of the fast implementation.

It is written from the mathematics, with explicit loops, dense matrices and `numpy.linalg`. It uses
no hook, no `unfold`, no Cholesky and no batching, and torch only for the gradients of the loss.

Legend:
    x       what goes into a layer
    y       what comes out of it
    a       a row of the input (a patch)
    g       gradient of ONE loss term by the matching row of y
    R       rows of a layer in one step
    N       loss terms in one step
    T       R / N
    A, G    second moments of a and g
    λ       damping
    d       the direction: W ← W − lr · (momentum of d)
"""

# ruff: noqa: F401  # these are the names that tests import
from reference.attention import attention_by_hand, attention_layers
from reference.experts import expert_by_hand, expert_layers
from reference.factors import Curvature, Factors, damped, factors_of, keep_blocks, second_moment
from reference.layers import Layer, layers_of
from reference.optimizer import ReferenceTHOR, by_stages, gradients
from reference.recurrent import recurrent_layers, sequence_by_hand, step_by_hand
from reference.rows import rows_of
