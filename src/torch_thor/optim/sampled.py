"""The sampled Fisher matrix: statistics from labels that are drawn from the model's own predictions.

The drawn labels are a function of a seed, the step, the process and the number of the call within the step. So there is
no random state to save, a resumed run draws the same labels as an uninterrupted one, and the states of torch's own
generators do not change.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Normal

from torch_thor.torch_internals import tree_leaves

if TYPE_CHECKING:
    from torch_thor.optim.base import CurvatureOptimizer

Predicts = str | Callable[[Any], Distribution]


def sample(
    optimizer: "CurvatureOptimizer",
    output: Any,
    distribution: Predicts,
    dim: int | None,
    mask: Tensor | None,
    seed: int,
) -> None:
    """Gather statistics from labels drawn from the model's predictions (:meth:`torch_thor.THOR.sample_fisher`)."""
    capture = optimizer._capture
    sampler = capture.sampler
    if sampler is None:
        raise RuntimeError(
            'sample_fisher() has no use with fisher="empirical", which takes the labels of the training loss; '
            'leave the call out, or make the optimizer with THOR(..., fisher="sampled")'
        )
    if not capture.awaited or not torch.is_grad_enabled():
        return
    if sampler.trained and capture.gradients_dropped():  # reset without a step since the loss of these rows
        capture.discard()
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    if not any(tensor.requires_grad for tensor in tensors):
        raise ValueError(
            "the output given to sample_fisher() requires no gradient, so no layer's statistics can come from it; "
            "give what the model returned, not detached"
        )
    if any(_nonfinite(tensor) for tensor in tensors):
        sampler.nonfinite = True  # as a rule the loss is not finite either, and step() raises the error
        return
    where = tensors[0].device
    rank = optimizer.distributed.processes(optimizer._plan).rank
    key = f"{seed}/{optimizer.param_groups[0]['step']}/{rank}/{sampler.passes}"
    with torch.autocast(where.type, enabled=False):
        labels = _distribution(output, distribution, dim)
        with _drawing(where, key), torch.no_grad():
            drawn = labels.sample()
        likelihoods = labels.log_prob(drawn)
        terms = likelihoods.numel() if mask is None else _count(mask, likelihoods.shape)
        if mask is not None:
            likelihoods = likelihoods.where(mask, 0.0)
        try:
            sampler.differentiate(-likelihoods.sum(), terms)
        except BaseException:
            capture.discard()
            raise


def _nonfinite(output: Tensor) -> bool:
    # a logit of -inf is allowed: it excludes a class
    return output.is_floating_point() and bool((output.isnan() | output.isposinf()).any())


def _distribution(output: Any, distribution: Predicts, dim: int | None) -> Distribution:
    if isinstance(output, Tensor) and output.dtype in (torch.float16, torch.bfloat16):
        output = output.float()
    if dim is not None and distribution != "categorical":
        raise ValueError(f"dim={dim}: has a meaning for categorical logits only; leave it out")
    made: Any = None
    if callable(distribution):
        made = distribution(output)
    elif distribution in _NAMED:
        made = _NAMED[distribution](_tensor(output), dim)
    if not isinstance(made, Distribution):
        raise ValueError(
            f"distribution={distribution!r}: must be one of {', '.join(map(repr, _NAMED))}, or a callable that makes a "
            f"torch.distributions.Distribution of the output; pass, for example, lambda mean: Normal(mean, 0.1)"
        )
    return made


# validate_args would synchronise host and device; sample_fisher() has checked the output for NaN already
_NAMED: dict[str, Callable[[Tensor, int | None], Distribution]] = {
    "categorical": lambda logits, dim: Categorical(logits=_classes_last(logits, dim), validate_args=False),
    "bernoulli": lambda logits, _: Bernoulli(logits=logits, validate_args=False),
    "normal": lambda means, _: Normal(means, torch.ones_like(means), validate_args=False),
}


def _tensor(output: Any) -> Tensor:
    if not isinstance(output, Tensor):
        raise ValueError(
            f"output of type {type(output).__name__}: must be a tensor where distribution= is a name; give the tensor "
            f"(output.logits), or a callable that makes a torch.distributions.Distribution of the whole"
        )
    return output


def _classes_last(logits: Tensor, dim: int | None) -> Tensor:
    if dim is None and logits.dim() > 2:
        raise ValueError(
            f"dim=None: logits of shape {tuple(logits.shape)} do not tell which dimension holds the classes; pass "
            f"dim=1, as torch.nn.functional.cross_entropy has it, or dim=-1, as language models have it"
        )
    if dim is not None and not -logits.dim() <= dim < logits.dim():
        raise ValueError(f"dim={dim}: logits of shape {tuple(logits.shape)} have no such dimension; pass dim=-1 or 1")
    return logits.movedim(-1 if dim is None else dim, -1)


def _count(mask: Tensor, shape: torch.Size) -> int:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != shape:
        what = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
        raise ValueError(
            f"mask={what}: must be a bool tensor of the labels' shape, {tuple(shape)}, True for those that count; "
            f"pass, for example, mask=labels != -100"
        )
    return int(mask.sum())


@contextmanager
def _drawing(device: torch.device, key: str) -> Iterator[None]:
    """Seed torch's generators of a device by a key, and restore their states when the block is left."""
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")
    devices = [] if device.type == "cpu" else [device.index]
    with torch.random.fork_rng(devices, device_type=device.type):
        torch.default_generator.manual_seed(seed)
        if devices:
            module = torch.get_device_module(device)
            with module.device(device):
                module.manual_seed(seed)
        yield
