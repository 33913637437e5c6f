"""N, the number of loss terms of a step, from the inputs of its layers' calls.

As a rule the input of a layer has N samples in its leading dimension. The exceptions are found by
comparing the layers of one pass: position embeddings (1, L), inputs without a batch dimension,
sequence-first inputs (L, N, d), and windows and experts, which see other numbers of rows than the
other layers.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import mode
from typing import Any

from torch import Tensor

from torch_thor.curvature.kinds import Kind


@dataclass(frozen=True)
class Call:
    """One call of a layer whose output has received a gradient."""

    layer: Any  # the layer, or anything hashable that identifies it
    loss_terms: int  # the size of the leading dimension of its input, 1 without a batch dimension
    dims: tuple[int, ...]  # the sizes of all dimensions of its input but that of the features
    certain: bool = False  # whether the leading dimension is known to be the batch
    embedding: bool = False  # whether the input consists of indices, of tokens or of positions


@dataclass
class Pass:
    """One backward pass."""

    calls: list[Call] = field(default_factory=list)
    repeated: bool = False  # whether it is another backward pass through calls that have had one


def call_of(layer: Any, kind: Kind, x: Tensor, rows: Tensor) -> Call:
    """Return what is told by the input of a call; ``rows`` is the same as a dense tensor."""
    # the rows of a nested input are those of its sequences
    sequences = x.size(0) if x.is_nested else 0
    dims = (sequences,) if sequences else tuple(kind.row_shape(rows))
    # no dims: rows are patches, as in a convolution; registered kinds may lack batch_first
    certain = not dims or sequences > 0 or bool(getattr(kind, "batch_first", False))
    return Call(layer, sequences or kind.loss_terms(rows), dims, certain, kind.diagonal_input)


def loss_terms_of_pass(calls: Iterable[Call]) -> tuple[int, int]:
    """Return the number of samples of a pass, and that nearest to the loss.

    If they differ, N is uncertain.
    """
    # 1. Calls of embeddings are left out if other layers were reached, and calls without a batch
    # dimension if others have one. 2. If calls whose leading dimension is certainly the batch have
    # M samples, a call with M in its second dimension and not in its leading one is sequence first,
    # and has M samples. 3. N is the number of the calls nearest to the input and nearest to the
    # loss if these agree; otherwise the most frequent number, and of several such numbers the one
    # nearest to the input.
    calls = list(calls)
    most = max(len(c.dims) for c in calls)  # of positions (L,) and tokens (N, L), the latter
    telling = [c for c in calls if not c.embedding] or [c for c in calls if len(c.dims) == most]
    telling = [c for c in telling if c.loss_terms > 1] or telling
    certain = [c.loss_terms for c in telling if c.certain]
    samples = mode(certain) if certain else 0
    numbers = [samples if _is_sequence_first(c, samples) else c.loss_terms for c in telling]
    last, first = numbers[0], numbers[-1]
    # of equally frequent numbers mode() returns the first
    return (first if first == last else mode(reversed(numbers))), last


def _is_sequence_first(call: Call, samples: int) -> bool:
    return not call.certain and len(call.dims) > 1 and call.dims[0] != samples == call.dims[1]


def loss_terms_of_step(passes: Iterable[Pass]) -> tuple[int, tuple[int, int] | None]:
    """Return N of a step, and the first pass whose N is uncertain.

    The pass is given as :func:`loss_terms_of_pass` returns it.
    """
    found = [(each, *loss_terms_of_pass(each.calls)) for each in passes if each.calls]
    totals: Counter[Any] = Counter()
    for each, number, _ in found:
        # the sum over micro-batches, but not over several losses of one batch
        if not each.repeated:
            totals.update(dict.fromkeys({call.layer for call in each.calls}, number))
    uncertain = next(((number, last) for _, number, last in found if number != last), None)
    return max(totals.values(), default=0), uncertain
