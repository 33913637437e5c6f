"""The sampled Fisher matrix: statistics from labels that are drawn from the model's own predictions.

The drawn labels are a function of a seed, the step, the process and the number of the call within the step. So there is
no random state to save, a resumed run draws the same labels as an uninterrupted one, and the states of torch's own
generators do not change.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Normal

from torch_thor.optim.joint_training import JointTraining
from torch_thor.torch_internals import tree_leaves

Predicts = str | Callable[[Any], Distribution]


class SampledFisher(JointTraining):
    """The part of THOR that gathers statistics from sampled labels (``fisher="sampled"``)."""

    def sample_fisher(
        self,
        output: Any,
        distribution: Predicts = "categorical",
        *,
        dim: int | None = None,
        mask: Tensor | None = None,
        seed: int = 0,
    ) -> None:
        """Gather statistics from labels drawn from the model's predictions; does nothing between refreshes.

        Call it once for each forward pass, before ``loss.backward()``. With ``fisher="sampled"`` a refresh step
        requires it. It costs a backward pass from the drawn labels to the outputs of the layers, without the gradients
        of weights. ``.grad`` and torch's random generators are not changed.

        Args:
            output: the predictions of the model, not detached.
            distribution: the distribution of the labels given the output: ``"categorical"`` (of logits, for
                ``cross_entropy``), ``"bernoulli"`` (of logits, for ``binary_cross_entropy_with_logits``), ``"normal"``
                (of means, with variance 1, for half of ``mse_loss``), or a callable from the output to a
                :class:`torch.distributions.Distribution`, which is called on refresh steps only. Each element of its
                ``batch_shape`` is a loss term; N is their number, unless ``loss_terms`` is set.
            dim: the dimension of categorical logits that holds the classes. None means the last one, and is allowed for
                logits of at most two dimensions.
            mask: bool, in the shape of the labels, True for the labels that count (``labels != -100``); None: all.
            seed: determines the drawn labels, together with the step, the process and the number of the call.

        Raises:
            RuntimeError: the optimizer was created with ``fisher="empirical"``, the call is not between a forward pass
                and its ``loss.backward()``, or it is the second call for this forward pass.
            ValueError: the distribution is unknown, ``dim`` or ``mask`` does not fit, or the output has no gradient.
        """
        capture = self._registry.capture
        sampler = capture.sampler
        if sampler is None:
            raise RuntimeError(
                'sample_fisher() has no use with fisher="empirical", which takes the labels of the training loss; '
                'leave the call out or, without scaling="spectral", make the optimizer with THOR(..., fisher="sampled")'
            )
        if not capture.watching or not torch.is_grad_enabled():
            return
        capture.discard_stale()
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
        key = f"{seed}/{self.param_groups[0]['step']}/{self._processes().rank}/{sampler.passes}"
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
