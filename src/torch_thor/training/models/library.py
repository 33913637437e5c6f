"""Networks of torchvision and timm by name, with random weights; pretrained weights are never downloaded.

A name is `torchvision:NAME`, `timm:NAME`, or bare: torchvision's where both know it.
"""

import difflib
import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

from torch_thor.training.errors import UserError, first_line, require

TORCHVISION, TIMM = "torchvision:", "timm:"
BUILD_ERRORS = (TypeError, ValueError, RuntimeError, AssertionError, NotImplementedError)


@dataclass(frozen=True)
class LibraryModel:
    """A network that one of the libraries has.

    Args:
        word: What the user called it.
        library: `torchvision:` or `timm:`.
        name: Its name there.
    """

    word: str
    library: str
    name: str

    def build(self) -> nn.Module:
        """Build it as the library has it by default.

        Returns:
            The network.
        """
        return self._build()

    def build_classifier(self, channels: int, classes: int) -> nn.Module:
        """Build it for images and classes of one's own.

        timm fits the first layer to any number of channels. Torchvision's networks take three, and are not changed.

        Args:
            channels: Channels of the images.
            classes: Number of classes.

        Returns:
            The network; it returns scores (N, classes) and nothing beside them, in training too.
        """
        self.check_classifier()
        if self.library == TIMM:
            return self._build(num_classes=classes, in_chans=channels)
        require(
            channels == 3,
            f"model={self.word} takes images of 3 channels and the data has {channels}: use one of timm's networks "
            f"({TIMM}{self.name}, if it has it), which take any number, or one of ours",
        )
        options: dict[str, Any] = {"num_classes": classes}
        if self.name in {"googlenet", "inception_v3"}:  # with their auxiliary heads they return three tensors
            options.update(aux_logits=False, init_weights=True)
        return self._build(**options)

    def check_classifier(self) -> None:
        """Refuse a network of torchvision's that does not classify images (it segments, detects, ...)."""
        if self.library == TORCHVISION:
            import torchvision

            require(
                self.name in torchvision.models.list_models(module=torchvision.models),
                f"model={self.word} does not classify images: use a classifier, such as resnet50",
            )

    def _build(self, **options: Any) -> nn.Module:
        try:
            if self.library == TIMM:
                import timm

                built: nn.Module = timm.create_model(self.name, pretrained=False, **options)
                return built
            import torchvision

            builder = torchvision.models.get_model_builder(self.name)
            if "weights_backbone" in inspect.signature(builder).parameters:
                options["weights_backbone"] = None  # the default is pretrained, whatever `weights` says
            built = torchvision.models.get_model(self.name, weights=None, **options)
        except BUILD_ERRORS as error:
            raise UserError(f"{self.word} could not be built: {first_line(error)}") from error
        return built


def find_model(word: str, own: list[str], otherwise: str) -> LibraryModel:
    """Look a network up by name.

    Args:
        word: The name, with or without its library.
        own: Other names that the user may have meant.
        otherwise: What to do if neither library knows it, in a few words.

    Returns:
        The network.

    Raises:
        UserError: If there is no such network, or timm is missing, which may know it.
    """
    known = list(own)
    if not word.startswith(TIMM):
        import torchvision

        name = word.removeprefix(TORCHVISION)
        theirs = torchvision.models.list_models()
        if name in theirs:
            return LibraryModel(word, TORCHVISION, name)
        known += theirs
        require(
            not word.startswith(TORCHVISION),
            f"{word} is not a torchvision model{nearest(name, theirs)}; {otherwise}",
        )
    name = word.removeprefix(TIMM)
    try:
        import timm
    except ModuleNotFoundError as error:
        raise UserError(
            f"{word} is not a torchvision model{nearest(name, known)}, and timm, which may know it, is missing: "
            "install it with `pip install 'torch-thor[timm]'`"
        ) from error
    if timm.is_model(name):
        return LibraryModel(word, TIMM, name)
    which = "not a timm model" if word.startswith(TIMM) else "neither a torchvision nor a timm model"
    raise UserError(f"{word} is {which}{nearest(name, [*known, *timm.list_models()])}; {otherwise}")


def nearest(word: str, known: list[str]) -> str:
    """Guess what was meant.

    Args:
        word: What was written.
        known: What there is.

    Returns:
        ` (did you mean X?)`, or nothing.
    """
    matches = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {matches[0]}?)" if matches else ""
