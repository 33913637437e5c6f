"""N, the number of loss terms of a step, from the shapes of the layers' inputs in its backward passes.

A layer's input has N samples in its leading dimension, as a rule. The exceptions show themselves where the layers of
one pass are looked at together: position embeddings ``(1, L)``, inputs without a batch, sequence-first inputs
``(L, N, d)``, windows and experts, which see other numbers of rows than the other layers.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Call:
    """One call of a layer whose output has got a gradient.

    Args:
        layer: which layer, anything hashable.
        loss_terms: the leading dimension of its input, 1 without a batch.
        dims: the leading dimensions of its input: all but the features.
        certain: whether the layer says which dimension is the batch: a convolution, an attention, a recurrent layer.
        embedding: whether its input are indices, of tokens or of positions.
    """

    layer: Any
    loss_terms: int
    dims: tuple[int, ...]
    certain: bool = False
    embedding: bool = False


@dataclass
class Pass:
    """What one backward pass has brought: its calls, from the loss back to the input.

    Args:
        calls: of the layers that count.
        repeated: whether the forward pass behind it has been gone through before in this step: its samples are counted.
    """

    calls: list[Call] = field(default_factory=list)
    repeated: bool = False


@dataclass(frozen=True)
class LossTerms:
    """What the calls of one pass say.

    Args:
        number: N of this pass.
        first: the layer nearest to the input that says so.
        last: the number that the layer nearest to the loss saw; what it should be, ``number``, if all is well.
    """

    number: int
    first: Any
    last: int


def loss_terms_of_pass(calls: Iterable[Call]) -> LossTerms:
    """Return the number of samples of a pass, in which most layers agree.

    Calls that say nothing are left out: those of embeddings where other layers were reached, and those without a batch
    where others have one. Where a convolution or an attention has M samples and a sequence has M in its second
    dimension and not in its leading one, it is sequence first. Then: what the layers nearest to the input and nearest
    to the loss agree on; else what most calls have, and of several such numbers the one nearest to the input.

    Args:
        calls: in the order of the backward pass; at least one.

    Returns:
        The number, and who said so.
    """
    calls = list(calls)
    telling = [c for c in calls if not c.embedding]
    if not telling:  # positions (L,) beside tokens (N, L): what has most dimensions
        telling = [c for c in calls if len(c.dims) == max(len(other.dims) for other in calls)]
    telling = [c for c in telling if c.loss_terms > 1] or telling
    certain = Counter(c.loss_terms for c in telling if c.certain)
    samples = certain.most_common(1)[0][0] if certain else 0
    numbers = [_batch_of(c, samples) for c in telling]
    last, first = numbers[0], numbers[-1]
    counts = Counter(reversed(numbers))  # of equal counts the first one met leads: the nearest to the input
    number = first if first == last else counts.most_common(1)[0][0]
    nearest = next(c.layer for c, n in zip(reversed(telling), reversed(numbers), strict=True) if n == number)
    return LossTerms(number, nearest, last)


def _batch_of(call: Call, samples: int) -> int:
    sequence_first = not call.certain and len(call.dims) > 1 and call.dims[0] != samples == call.dims[1]
    return samples if sequence_first else call.loss_terms


def loss_terms_of_step(passes: Iterable[Pass]) -> int:
    """Return N of a step: micro-batches add up, several losses of one batch do not.

    Passes that share a layer are micro-batches. Two that share none are two heads of one model, and a pass that goes
    through a forward pass for a second time (``retain_graph``) has no samples of its own.

    Args:
        passes: the backward passes of the step.

    Returns:
        N, 0 where no layer was reached.
    """
    totals: Counter[Any] = Counter()
    for one in passes:
        if one.calls and not one.repeated:
            number = loss_terms_of_pass(one.calls).number
            for layer in {call.layer for call in one.calls}:
                totals[layer] += number
    return max(totals.values(), default=0)
