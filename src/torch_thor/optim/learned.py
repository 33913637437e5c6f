"""Which weights a network has learned already, and the learning rates that these take.

A step that is right from scratch is much too long where a network is trained already: it replaces
what is there. So :class:`torch_thor.ThorMuon` without a learning rate takes smaller steps there. It
looks at the weights in its first step, and never again.

The entries of an untrained matrix are independent of each other in almost every initializer.
Training makes them dependent: it adds a few directions with large singular values.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from torch_thor.curvature.blocks import has_values, widened
from torch_thor.curvature.refresh import Beside
from torch_thor.optim.plan import Binding

# The learning rate, as a share of that of a matrix that is to be trained from scratch
# (benchmarks/finetuning.py).
LEARNED = 0.125  # of a matrix that is trained already
UNTOLD = 0.25  # of a matrix that does not tell: of zeros, or with one row or column
REST = 0.0125  # of embeddings, biases and parameters of normalisation layers in a trained network
NEW = 1.0

DEPENDENT = 5.0  # standard errors; 3,700 matrices of 60 untrained networks have at most 3.4
LEAST_SHARE = 0.25  # of the matrices of a network that is trained already
_MATRICES = {
    LEARNED: "matrices whose entries are dependent, as training leaves them",
    UNTOLD: "matrices that do not tell (of zeros, or with one row or column)",
    NEW: "matrices whose entries are independent, as initializers leave them",
}
MOST_ROWS = 512  # that are looked at, evenly spaced, and as many columns
_ROUNDING = 1e-14


def rectangles(matrix: Tensor) -> Tensor:
    """Return the sum of ``w_ij w_kj w_il w_kl`` over all rows i ≠ k and columns j ≠ l."""
    gram = matrix @ matrix.mT if matrix.shape[0] <= matrix.shape[1] else matrix.mT @ matrix
    squares = matrix.square()
    of_lines = squares.sum(0).square().sum() + squares.sum(1).square().sum()
    return gram.square().sum() - of_lines + squares.square().sum()


def dependence(matrix: Tensor) -> Tensor:
    """Return by how many standard errors the entries of a matrix are dependent, as a scalar tensor.

    If the sign of each entry is independent of all others, the products over rectangles of entries
    have mean 0 and are uncorrelated, whatever the sizes of the entries; so their sum has the
    variance ``4 · rectangles(W ∘ W)``. For entries of one variance this is the test of sphericity
    for many dimensions (Ledoit and Wolf 2002, Annals of Statistics 30). Large singular values make
    it positive, orthogonal rows negative. It is NaN for a matrix without rectangles, as of zeros.
    """
    squares = matrix.square() / matrix.square().amax()
    matrix = matrix / matrix.abs().amax()
    variance = 4 * rectangles(squares)
    # what is left of a difference that should be zero
    nothing = variance <= _ROUNDING * squares.sum().square().square()
    return torch.where(nothing, math.nan, rectangles(matrix) / variance.sqrt())


class Look(Beside):
    """A look at the weights of a model: the dependence of each that has rows and columns."""

    def __init__(self, binding: Binding, note: Callable[[str], None]) -> None:
        self.binding, self.note = binding, note
        by_parameter = _dependences(binding.plan.model.parameters())
        self.keys, device = [*by_parameter], binding.plan.device
        values = [value.float().to(device) for value in by_parameter.values()]
        super().__init__(torch.stack(values) if values else torch.zeros(0, device=device))

    def take(self) -> None:
        """Decide on the factors of the parameters that have none, and store them."""
        binding, known = self.binding, dict(zip(self.keys, self.read(), strict=True))
        trained = _is_trained(binding, known.values())
        for group in binding.groups:
            for parameter in group["params"]:
                state = binding.states.get(parameter)
                if group["auto_lr"] and state is not None and "lr_factor" not in state:
                    value = known.get(id(parameter), math.nan)
                    is_matrix = binding.is_matrix(parameter)
                    state["lr_factor"] = factor_of(value, is_matrix) if trained else NEW
        if trained:
            self.note(described(binding, decided(binding)))


def factor_of(value: float, is_matrix: bool) -> float:
    """Return the factor of a parameter of a trained network from its dependence."""
    if not is_matrix:
        return REST
    if math.isnan(value):
        return UNTOLD
    return LEARNED if abs(value) > DEPENDENT else NEW


def decided(binding: Binding) -> dict[int, float]:
    """Return the factors that the state holds, by the ids of the parameters."""
    trained = (p for group in binding.groups if group["auto_lr"] for p in group["params"])
    states = ((id(p), binding.states.get(p, {})) for p in trained)
    return {key: state["lr_factor"] for key, state in states if "lr_factor" in state}


def described(binding: Binding, factors: Mapping[int, float]) -> str:
    """Return which learning rates the groups without one have, and why."""
    if not factors:
        return "the first step tells from the weights whether they are trained already"
    if all(factor == NEW for factor in factors.values()):
        return "the network was not trained before, so lr is that of all parameters"
    trained = (p for group in binding.groups for p in group["params"] if id(p) in factors)
    matrices = Counter(factors[id(p)] for p in trained if binding.is_matrix(p))
    parts = [
        f"{factor:g} for {matrices[factor]} {what}"
        for factor, what in _MATRICES.items()
        if matrices[factor]
    ]
    rest = len(factors) - matrices.total()
    parts += [f"{REST:g} for {rest} other parameters"] if rest else []
    return f"the network is trained already, so lr is multiplied by {', '.join(parts)}"


def looks_trained(model: nn.Module) -> bool:
    """Return whether a network is trained already, by its weights; the host waits for them."""
    return _are_trained([float(value) for value in _dependences(model.parameters()).values()])


def _is_trained(binding: Binding, dependences: Collection[float]) -> bool:
    """Return whether the network is trained already, which is decided once."""
    before = decided(binding).values()
    return any(factor != NEW for factor in before) if before else _are_trained(dependences)


def _are_trained(dependences: Collection[float]) -> bool:
    trained = sum(value > DEPENDENT for value in dependences)
    return trained > 0 and trained >= LEAST_SHARE * len(dependences)


def _dependences(parameters: Iterable[Tensor]) -> dict[int, Tensor]:
    """Return the dependence of each parameter with rows and columns, frozen or not, by its id."""
    dependences: dict[int, Tensor] = {}
    for parameter in parameters:
        lazy = isinstance(parameter, nn.UninitializedParameter)
        if lazy or parameter.dim() < 2 or not has_values(parameter):
            continue
        # All processes of a sharded weight take part, and see what a single one sees.
        weight = parameter.detach()
        weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        quantised = not (weight.is_floating_point() or weight.is_complex())
        if weight.is_floating_point() and weight.numel():
            # convolutions have a row for each output, experts a matrix each
            views = weight.flatten(1), weight.flatten(0, -2)
            used = views if weight.dim() > 2 and min(views[1].shape) > 1 else views[:1]
            values = [dependence(_thinned(view)) for view in used]
            dependences[id(parameter)] = torch.stack(values).amax()
        elif quantised and not parameter.requires_grad:  # which is done to what is trained
            dependences[id(parameter)] = torch.tensor(math.inf, device="cpu")
    return dependences


def _thinned(matrix: Tensor) -> Tensor:
    """Return evenly spaced rows and columns in float64, because sums of fourth powers cancel."""
    rows, columns = (math.ceil(size / MOST_ROWS) for size in matrix.shape)
    return widened(matrix[::rows, ::columns])
