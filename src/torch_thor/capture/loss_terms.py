"""Derives N, the number of loss terms of a step, from the shapes of the layers' inputs in its backward passes.

As a rule the input of a layer has N samples in its leading dimension. The exceptions are found by comparing the layers
of one pass: position embeddings ``(1, L)``, inputs without a batch dimension, sequence-first inputs ``(L, N, d)``, and
windows and experts, which see other numbers of rows than the other layers.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


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
    repeated: bool = False


def loss_terms_of_pass(calls: Iterable[Call]) -> tuple[int, int]:
    """Return the number of samples of a pass, and that nearest to the loss: if they differ, N is uncertain."""
    # 1. Calls of embeddings are left out if other layers were reached, and calls without a batch dimension if others
    # have one. 2. If calls whose leading dimension is certainly the batch have M samples, a call with M in its second
    # dimension and not in its leading one is sequence first, and has M samples. 3. N is the number of the calls nearest
    # to the input and nearest to the loss if these agree; otherwise the most frequent number, and of several such
    # numbers the one nearest to the input.
    calls = list(calls)
    telling = [c for c in calls if not c.embedding]
    if not telling:  # of positions (L,) and tokens (N, L), the ones with most dimensions
        telling = [c for c in calls if len(c.dims) == max(len(other.dims) for other in calls)]
    telling = [c for c in telling if c.loss_terms > 1] or telling
    certain = Counter(c.loss_terms for c in telling if c.certain)
    samples = certain.most_common(1)[0][0] if certain else 0
    numbers = [_batch_of(c, samples) for c in telling]
    last, first = numbers[0], numbers[-1]
    counts = Counter(reversed(numbers))  # for equal counts most_common() returns the first: that nearest to the input
    number = first if first == last else counts.most_common(1)[0][0]
    return number, last


def _batch_of(call: Call, samples: int) -> int:
    sequence_first = not call.certain and len(call.dims) > 1 and call.dims[0] != samples == call.dims[1]
    return samples if sequence_first else call.loss_terms


def loss_terms_of_step(passes: Iterable[Pass]) -> tuple[int, tuple[int, int] | None]:
    """Return N of a step, and the first pass whose N is uncertain, as :func:`loss_terms_of_pass` returns it."""
    totals: Counter[Any] = Counter()
    uncertain = None
    for one in passes:
        if one.calls:
            number, last = loss_terms_of_pass(one.calls)
            if uncertain is None and number != last:
                uncertain = number, last
            # the sum over micro-batches, but not over several losses of one batch
            for layer in set() if one.repeated else {call.layer for call in one.calls}:
                totals[layer] += number
    return max(totals.values(), default=0), uncertain
