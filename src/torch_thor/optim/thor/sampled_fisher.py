"""The sampled Fisher matrix: statistics from labels that are drawn from the model's own predictions.

Which labels are drawn is a function of a seed, the step, the process and the call within the step. So there is no
random state to save, a resumed run draws what it would have drawn, and torch's own generators go on as if nothing had
been drawn.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Normal
from torch.utils._pytree import tree_leaves

from torch_thor.curvature.processes import Processes
from torch_thor.optim.thor.layer_registry import LayerRegistry

Predicts = str | Callable[[Any], Distribution]


class SampledFisher:
    """What an optimizer with ``fisher="sampled"`` has beside :meth:`step`."""

    param_groups: list[dict[str, Any]]
    _registry: LayerRegistry

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

        Once for each forward pass, before ``loss.backward()``. A refresh step needs it (``fisher="sampled"``); it costs
        a backward pass from the drawn labels to the layers' outputs, without the gradients of weights. ``.grad`` and
        torch's random generators stay as they are.

        Args:
            output: what the model has predicted, not detached.
            distribution: of the labels, given the output: ``"categorical"`` (logits, the loss ``cross_entropy``),
                ``"bernoulli"`` (logits, ``binary_cross_entropy_with_logits``), ``"normal"`` (means, variance 1: the
                loss is half of ``mse_loss``), or a callable from the output to a
                :class:`torch.distributions.Distribution`, called on refresh steps only. Each element of its
                ``batch_shape`` is a loss term; N is their number, unless ``loss_terms`` says otherwise.
            dim: which dimension of categorical logits holds the classes; None where there are no more than two: the
                last.
            mask: bool, of the shape of the labels: True for those that count (``labels != -100``); None: all.
            seed: which labels are drawn, together with step, process and call.

        Raises:
            RuntimeError: the optimizer was made with ``fisher="empirical"``, or the call is not between the forward
                pass and its ``loss.backward()``, or the second one.
            ValueError: the distribution is not known, ``dim`` or ``mask`` do not fit, or the output has no gradient.
        """
        capture = self._registry.capture
        sampler = capture.sampler
        if sampler is None:
            raise RuntimeError(
                'sample_fisher() has no use with fisher="empirical", which takes the labels of the training loss; '
                'make the optimizer with THOR(..., fisher="sampled")'
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
            sampler.nonfinite = True  # the loss is not finite either, and step() says so
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

    def _processes(self) -> Processes:
        raise NotImplementedError


def _nonfinite(output: Tensor) -> bool:
    return output.is_floating_point() and bool((output.isnan() | output.isposinf()).any())  # -inf: an excluded class


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


# validate_args would synchronise host and device; sample_fisher() has looked for NaN already
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
    """Have torch's generators of this device give the numbers of a key, and go on afterwards as before."""
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")
    devices = [] if device.type == "cpu" else [device.index]
    with torch.random.fork_rng(devices, device_type=device.type):
        torch.default_generator.manual_seed(seed)
        if devices:
            module = torch.get_device_module(device)
            with module.device(device):
                module.manual_seed(seed)
        yield
