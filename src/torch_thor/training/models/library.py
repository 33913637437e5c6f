"""Networks of torchvision and timm by name, with random weights. Pretrained weights are never downloaded.

A name is `torchvision:NAME`, `timm:NAME`, or just `NAME`, which is torchvision's if both libraries have it.
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
    """A network of one of the libraries.

    Args:
        word: The name that the user gave.
        library: `torchvision:` or `timm:`.
        name: Its name in the library.
    """

    word: str
    library: str
    name: str

    def build(self) -> nn.Module:
        """Build the network with the library's defaults.

        Returns:
            The network.
        """
        return self._build()

    def build_classifier(self, channels: int, classes: int) -> nn.Module:
        """Build the network for the user's images and classes.

        timm adapts the first layer to any number of channels. The networks of torchvision need three.

        Args:
            channels: Channels of the images.
            classes: Number of classes.

        Returns:
            The network. It returns only logits (N, classes), also in training mode.

        Raises:
            UserError: If the network cannot be built for them.
        """
        self.check_classifier()
        if self.library == TIMM:
            return self._build(num_classes=classes, in_chans=channels)
        require(
            channels == 3,
            f"model={self.word} takes images of 3 channels, and those of the data have {channels}: use a network of "
            f"timm ({TIMM}{self.name}, if it exists), which takes any number, or one of torch-thor itself",
        )
        options: dict[str, Any] = {"num_classes": classes}
        if self.name in {"googlenet", "inception_v3"}:  # with their auxiliary heads they return three tensors
            options.update(aux_logits=False, init_weights=True)
        return self._build(**options)

    def check_classifier(self) -> None:
        """Refuse a network of torchvision that does not classify images but segments, detects, and so on.

        Raises:
            UserError: If it is such a network.
        """
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
    """Find a network by name.

    Args:
        word: The name, with or without its library.
        own: Other names that the user may have meant.
        otherwise: The remedy in the error message if neither library has the network.

    Returns:
        The network.

    Raises:
        UserError: If there is no such network, or timm, which might have it, is not installed.
        ModuleNotFoundError: If timm is installed without a module that it needs.
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
        if error.name != "timm":  # but a module that timm needs
            raise
        raise UserError(
            f"{word} is not a torchvision model{nearest(name, known)}, and timm, which may have it, is not installed: "
            "install it with `pip install 'torch-thor[timm]'`"
        ) from error
    if timm.is_model(name):
        return LibraryModel(word, TIMM, name)
    which = "not a timm model" if word.startswith(TIMM) else "neither a torchvision nor a timm model"
    raise UserError(f"{word} is {which}{nearest(name, [*known, *timm.list_models()])}; {otherwise}")


def nearest(word: str, known: list[str]) -> str:
    """Suggest the known name that is most similar to a word.

    Args:
        word: The word.
        known: The known names.

    Returns:
        ` (did you mean X?)`, or an empty string if no name is similar.
    """
    matches = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {matches[0]}?)" if matches else ""
