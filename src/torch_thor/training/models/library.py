"""Networks by name with random weights: the application's small networks, torchvision's and timm's.

A name of a library is `torchvision:NAME`, `timm:NAME`, or just `NAME`, which is torchvision's if
both have it. Pretrained weights are never downloaded.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from torch_thor.errors import UserError, first_line, require
from torch_thor.training.models.small import CLASSIFIERS
from torch_thor.training.recipe_keys import nearest

TORCHVISION, TIMM = "torchvision:", "timm:"


def build_model(name: str, in_channels: int, classes: int) -> nn.Module:
    """Return a new CPU image classifier, built with torch's global random numbers (seed first).

    It returns only logits (N, classes), also in training mode.

    Raises:
        UserError: If there is no such network, or it takes other images.
    """
    if name in CLASSIFIERS:
        return CLASSIFIERS[name](in_channels, classes)
    library, build = _find(name)
    if library == TIMM:
        return build(num_classes=classes, in_chans=in_channels)
    require(
        in_channels == 3,
        f"model={name} takes images of 3 channels, and those of the data have {in_channels}: use a "
        f"network of timm ({TIMM}NAME), which takes any number, or a network of torch-thor itself",
    )
    if name.endswith(("googlenet", "inception_v3")):  # which otherwise return three tensors
        return build(num_classes=classes, aux_logits=False, init_weights=True)
    return build(num_classes=classes)


def _find(name: str) -> tuple[str, Callable[..., nn.Module]]:
    """Return the library (`torchvision:` or `timm:`) that has a classifier, and what builds it."""
    from torchvision import models  # slow to import

    bare_name = name.removeprefix(TORCHVISION).removeprefix(TIMM)
    known = [] if name.startswith(TIMM) else models.list_models(module=models)
    if bare_name in known:
        return TORCHVISION, partial(models.get_model, bare_name, weights=None)
    advice = "give an image classifier of torch-thor, torchvision or timm"
    if not name.startswith(TORCHVISION):
        try:
            import timm
        except ModuleNotFoundError:
            advice = "timm, which may have it, is not installed: `pip install 'torch-thor[timm]'`"
        else:
            if timm.is_model(bare_name):
                return TIMM, partial(timm.create_model, bare_name, pretrained=False)
            known += timm.list_models()
    raise UserError(
        f"model={name} is not a network{nearest(bare_name, [*CLASSIFIERS, *known])}: {advice}"
    )


@torch.no_grad()
def check_fits(name: str, model: nn.Module, image_shape: Sequence[int], classes: int) -> None:
    """Refuse a new classifier that does not turn images (C, H, W) into logits (N, classes)."""
    size = " x ".join(map(str, image_shape))
    try:
        scores = model.eval()(torch.zeros(2, *image_shape))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise UserError(
            f"model={name} cannot process the data's images ({size}): {first_line(error)}; use "
            "another model, or other data"
        ) from error
    model.train()
    shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
    require(
        shape == (2, classes),
        f"model={name} returns {shape} for 2 images ({size}) instead of logits (2, {classes}): use "
        "a classifier",
    )
