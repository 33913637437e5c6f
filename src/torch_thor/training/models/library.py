"""Networks by name with random weights: the application's small ones, torchvision's and timm's.

A name of a library is `torchvision:NAME`, `timm:NAME`, or just `NAME`, which is torchvision's if
both have it. Pretrained weights are never downloaded.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.errors import UserError, explaining, first_line, require
from torch_thor.training.models.small import CLASSIFIERS
from torch_thor.training.recipe_keys import nearest

TORCHVISION, TIMM = "torchvision:", "timm:"


def build_model(name: str, in_channels: int, classes: int) -> nn.Module:
    """Return a new CPU image classifier, built with torch's global random numbers (seed first).

    It returns only logits (N, classes), also in training mode.

    Raises:
        UserError: If there is no such network, it does not classify images, or it cannot be built
            for them.
    """
    check_name(name)
    if name in CLASSIFIERS:
        return CLASSIFIERS[name](in_channels, classes)
    library, bare_name = find_model(name)
    if library == TIMM:
        return build_library_model(name, num_classes=classes, in_chans=in_channels)
    require(
        in_channels == 3,
        f"model={name} takes images of 3 channels, and those of the data have {in_channels}: use a "
        f"network of timm ({TIMM}{bare_name}, if it exists), which takes any number, or one of "
        "torch-thor itself",
    )
    # with their auxiliary heads these return three tensors
    alone = (
        {"aux_logits": False, "init_weights": True}
        if bare_name in {"googlenet", "inception_v3"}
        else {}
    )
    return build_library_model(name, num_classes=classes, **alone)


def build_library_model(name: str, **options: Any) -> nn.Module:
    """Return a new network of torchvision or timm, by default with the defaults of the library.

    Raises:
        UserError: If there is no such network, or it cannot be built.
    """
    library, bare_name = find_model(name)
    model: nn.Module
    with explaining(
        (TypeError, ValueError, RuntimeError, AssertionError, NotImplementedError),
        lambda error: f"model={name} could not be built: {first_line(error)}",
    ):
        if library == TIMM:
            import timm

            model = timm.create_model(bare_name, pretrained=False, **options)
        else:
            from torchvision import models

            if (
                "weights_backbone"
                in inspect.signature(models.get_model_builder(bare_name)).parameters
            ):
                # the default is pretrained, whatever `weights` says
                options["weights_backbone"] = None
            model = models.get_model(bare_name, weights=None, **options)
    return model


def check_name(name: str) -> None:
    """Refuse a name that is not an image classifier."""
    if name in CLASSIFIERS:
        return
    library, bare_name = find_model(name)
    from torchvision import models  # slow to import

    require(
        library == TIMM or bare_name in models.list_models(module=models),
        f"model={name} does not classify images: use a classifier, such as resnet50",
    )


def find_model(name: str) -> tuple[str, str]:
    """Return the library (`torchvision:` or `timm:`) that has a network, and its name there.

    Raises:
        UserError: If there is no such network, or timm, which might have it, is not installed.
    """
    from torchvision import models

    bare_name = name.removeprefix(TORCHVISION).removeprefix(TIMM)
    known = [] if name.startswith(TIMM) else models.list_models()
    if bare_name in known:
        return TORCHVISION, bare_name
    advice = "give a name of torch-thor, torchvision or timm"
    if not name.startswith(TORCHVISION):
        try:
            import timm
        except ModuleNotFoundError:
            advice = "timm, which may have it, is not installed: `pip install 'torch-thor[timm]'`"
        else:
            if timm.is_model(bare_name):
                return TIMM, bare_name
            known = [*known, *timm.list_models()]
    raise UserError(
        f"model={name} is not a network{nearest(bare_name, [*CLASSIFIERS, *known])}: {advice}"
    )


@torch.no_grad()
def check_fits(name: str, model: nn.Module, image_shape: Sequence[int], classes: int) -> int:
    """Refuse a classifier that cannot process images (C, H, W).

    Its weights, running statistics and mode do not change.

    Returns:
        The number of images that it needs in training: 2 if a BatchNorm has one value of each
        channel per image, and no variance of a single one; else 1.

    Raises:
        UserError: If it fails on such images, or does not return logits (N, classes).
    """
    size = " x ".join(map(str, image_shape))
    parameter, training, least = next(model.parameters()), model.training, [1]

    def look(module: Any, inputs: tuple[Tensor, ...]) -> None:
        is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if is_norm and inputs[0].numel() == 2 * module.num_features:  # of two images
            least.append(2)

    unfit = explaining(
        (RuntimeError, ValueError, AssertionError),
        lambda error: (
            f"model={name} cannot process the data's images ({size}): {first_line(error)}; use "
            "another model, or other data"
        ),
    )
    try:
        with unfit, nn.modules.module.register_module_forward_pre_hook(look):
            scores = model.eval()(
                torch.zeros(2, *image_shape, dtype=parameter.dtype, device=parameter.device)
            )
    finally:
        model.train(training)
    shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
    require(
        shape == (2, classes),
        f"model={name} returns {shape} for 2 images ({size}) instead of logits (2, {classes}): use "
        "a classifier",
    )
    return max(least)
