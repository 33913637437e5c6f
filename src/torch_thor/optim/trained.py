"""Whether a network is trained already, and the learning rates that its weights take then.

A step that is right from scratch is much too long where a network is trained already: it replaces
what is there. So :class:`torch_thor.ThorMuon` without a learning rate takes smaller steps there. It
decides in its first step, for which the host waits once; the answer is saved with the groups.

Where frozen or quantised weights hold more numbers than the trained matrices, the network is
trained. Otherwise the trained matrices tell: the entries of an untrained matrix are independent of
each other in almost every initializer, and training makes them dependent, because it adds a few
directions with large singular values.
"""

import math
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from torch_thor.curvature.blocks import widened
from torch_thor.curvature.communication import Processes
from torch_thor.optim.batches import Binding

# The learning rate, as a share of the rate of a matrix that is to be trained from scratch
# (benchmarks/finetuning.py).
LEARNED = 0.125  # of a matrix that is trained already
UNTOLD = 0.25  # of a matrix that does not tell
REST = 0.0125  # of embeddings, biases and parameters of normalisation layers in a trained network
NEW = 1.0

# standard errors, where 1,703 of 1,706 untrained matrices have at most 3.1: the tables are in
# benchmarks/results/untrained.md
DEPENDENT = 5.0
# Of the matrices that tell, a larger share is dependent in a network that is trained already.
LEAST_SHARE = 0.25
ALL = 0.05  # with THOR, of every parameter but new matrices
_WORDS = {
    LEARNED: "matrices whose entries are dependent, as training leaves them",
    UNTOLD: "matrices that do not tell (of zeros, of one sign, or with equal rows or columns)",
    NEW: "matrices whose entries are independent, as initializers leave them",
    REST: "other parameters",
    ALL: "other parameters",
}
MOST_ROWS = 512  # that are looked at, evenly spaced, and as many columns
_ROUNDING = 1e-14
# of matrices in buffers, in which modules without others inside keep quantised weights (GPTQ, AWQ)
_QUANTISED = (torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2)


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
    it positive, orthogonal rows negative. Of equal rows, and of equal columns, the first counts. It
    is NaN for a matrix that does not tell: without rectangles, or with entries of one sign.
    """
    has_one_sign = (matrix.amin() >= 0) | (matrix.amax() <= 0)
    matrix = matrix / matrix.abs().amax()
    matrix = _without_equal_rows(_without_equal_rows(matrix).mT).mT
    squares = matrix.square()
    variance = 4 * rectangles(squares)
    # what is left of a difference that should be zero
    nothing = variance <= _ROUNDING * squares.sum().square().square()
    return torch.where(nothing | has_one_sign, math.nan, rectangles(matrix) / variance.sqrt())


def _without_equal_rows(matrix: Tensor) -> Tensor:
    """Replace each row that equals an earlier row by zeros, which are part of no rectangle."""
    gram = matrix @ matrix.mT
    squares = gram.diagonal()
    sums = squares[:, None] + squares
    equal = sums - 2 * gram.abs() <= _ROUNDING * len(matrix) * sums  # up to the sign
    return matrix * ~equal.tril(-1).any(1, keepdim=True)


def decide(binding: Binding, processes: Processes, *, alike: bool) -> str:
    """Store the factor of each parameter of a group with ``auto_lr``, and return what they are.

    Parameters that have a rate keep it. ``alike``: all but new matrices have the same.

    Returns:
        The factors in words, where the network is found to be trained; empty otherwise.
    """
    undecided = [
        parameter
        for group in binding.groups
        if group["auto_lr"]
        for parameter in group["params"]
        if "lr_factor" not in binding.states.get(parameter, {"lr_factor": NEW})
    ]
    if not undecided:
        return ""
    trained, values = is_trained(binding), dict[int, float]()
    is_first = trained is None
    if trained is not False:
        matrices, others = _matrices(binding)
        found = [dependence_of(p).float().to(binding.plan.device) for p in matrices]
        numbers = torch.stack(found).tolist() if found else []
        values = dict(zip(map(id, matrices), processes.gather(numbers)[0], strict=True))
        if is_first:
            trained = others > sum(p.numel() for p in matrices) or _look_trained(values.values())
    for group in binding.groups:
        group["trained"] = trained
    for parameter in undecided:
        value = values.get(id(parameter), math.nan)
        factor = factor_of(value, binding.is_matrix(parameter)) if trained else NEW
        factor = ALL if alike and factor != NEW else factor
        binding.states[parameter]["lr_factor"] = factor
    return described(binding) if trained and is_first else ""


def is_trained(binding: Binding) -> bool | None:
    """Return whether the network was trained already; None before the first step."""
    answers = (group["trained"] for group in binding.groups)
    return next((answer for answer in answers if answer is not None), None)


def factor_of(value: float, is_matrix: bool) -> float:
    """Return the factor of a parameter of a trained network from its dependence."""
    if not is_matrix:
        return REST
    if math.isnan(value):
        return UNTOLD
    return LEARNED if abs(value) > DEPENDENT else NEW


def described(binding: Binding) -> str:
    """Return which learning rates the groups without a given rate have, and why."""
    trained = is_trained(binding)
    if trained is None:
        return "the first step tells from the weights whether they are trained already"
    if not trained:
        return "the network was not trained before, so lr applies to all parameters"
    parameters = [p for group in binding.groups if group["auto_lr"] for p in group["params"]]
    decided = [p for p in parameters if "lr_factor" in binding.states.get(p, {})]
    counts = Counter(binding.states[p]["lr_factor"] for p in decided)
    parts = [f"{f:g} for {counts[f]} {what}" for f, what in _WORDS.items() if counts[f]]
    return f"the network is trained already, so lr is multiplied by {', '.join(parts)}"


def _look_trained(dependences: Iterable[float]) -> bool:
    told = [value for value in dependences if not math.isnan(value)]
    return sum(value > DEPENDENT for value in told) > LEAST_SHARE * len(told)


def _matrices(binding: Binding) -> tuple[list[nn.Parameter], int]:
    """Return the trained matrices, and how many numbers frozen and quantised weights hold."""
    trained, others = [], 0
    for _, owner in binding.plan.attributes:
        parameter = binding.plan.places[id(owner.module), owner.attribute]
        if parameter.dim() < 2 or isinstance(owner.module, nn.Embedding | nn.EmbeddingBag):
            continue
        if not parameter.requires_grad:
            others += parameter.numel()
        elif id(parameter) in binding.group_of and parameter.is_floating_point():
            trained.append(parameter)
    leaves = (module for module in binding.plan.model.modules() if not module._modules)
    buffers = (buffer for module in leaves for buffer in module.buffers() if buffer.dim() == 2)
    return trained, others + sum(b.numel() for b in buffers if b.dtype in _QUANTISED)


def dependence_of(parameter: nn.Parameter) -> Tensor:
    """Return the dependence of a parameter, the largest of its views as a matrix."""
    weight = parameter.detach()
    # all processes of a sharded weight take part, and see what a single process sees
    weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    if not weight.numel():
        return torch.full((), math.nan, device=weight.device)
    # convolutions have a row for each output, experts a matrix each
    views = weight.flatten(1), weight.flatten(0, -2)
    used = views if weight.dim() > 2 and min(views[1].shape) > 1 else views[:1]
    return torch.stack([dependence(_thinned(view)) for view in used]).amax()


def _thinned(matrix: Tensor) -> Tensor:
    """Return evenly spaced rows and columns in float64, because sums of fourth powers cancel."""
    rows, columns = (math.ceil(size / MOST_ROWS) for size in matrix.shape)
    return widened(matrix[::rows, ::columns])
