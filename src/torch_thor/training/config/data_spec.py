"""The settings of the data in a recipe: which data set, its folder, and how its images are read."""

from dataclasses import dataclass, field

from torch_thor.training.config.text_spec import TextSpec
from torch_thor.training.errors import require

IN_MEMORY = {"digits": (1, 8, 8), "fashion-mnist": (1, 28, 28)}  # shapes of their images
FOLDER = "image-folder"
CIFAR_SETS = ("cifar10", "cifar100")
PYTHON_TEXT, CORPUS = "python-text", "corpus"
TEXTS = (PYTHON_TEXT, CORPUS)

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True, kw_only=True)
class ImageTransform:
    """Sizes and chances.

    Args:
        size: Side of the square that the network sees, in pixels.
        resize: Length of the shorter side before the centre crop of evaluation, in pixels.
        scale: Least and greatest share of the area that a training crop covers.
        ratio: Least and greatest width over height of a training crop.
        flip: Probability of a horizontal flip.
        padding: `None`: random resized crops. A number: crops of `size` out of the image with that many black pixels
            around it, as is usual on CIFAR; `scale` and `ratio` are then not used.
        mean: Of each channel, for pixels in [0, 1].
        std: Of each channel, for pixels in [0, 1].
    """

    size: int = 224
    resize: int = 256
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    padding: int | None = None
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD

    def __post_init__(self) -> None:
        require(self.size >= 1, f"transform.size={self.size} must be 1 pixel or more")
        require(
            self.resize >= self.size,
            f"transform.resize={self.resize} must be transform.size={self.size} or more: the centre is cropped from it",
        )
        require(
            0 < self.scale[0] <= self.scale[1] <= 1,
            f"transform.scale={list(self.scale)} must be two shares of the area, 0 < least <= greatest <= 1",
        )
        require(
            0 < self.ratio[0] <= self.ratio[1],
            f"transform.ratio={list(self.ratio)} must be two ratios of width to height, 0 < least <= greatest",
        )
        require(0 <= self.flip <= 1, f"transform.flip={self.flip} must be a probability in [0, 1]")
        require(
            self.padding is None or self.padding >= 0,
            f"transform.padding={self.padding} must be 0 pixels or more; null takes random resized crops",
        )
        require(all(value > 0 for value in self.std), f"transform.std={list(self.std)} must be above 0")


IMAGENET = ImageTransform()
CIFAR = ImageTransform(size=32, resize=32, mean=CIFAR_MEAN, std=CIFAR_STD)


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The processes that read and crop images, or make examples of text.

    Args:
        count: How many; 0 reads in the training process. Batches are the same for any number.
        prefetch: Batches that each keeps ready.
    """

    count: int = 4
    prefetch: int = 2

    def __post_init__(self) -> None:
        require(self.count >= 0, f"workers={self.count} must be 0 or more; 0 reads in the training process")
        require(self.prefetch >= 1, f"prefetch={self.prefetch} must be 1 batch or more")


@dataclass(frozen=True)
class DataSpec:
    """Which data set, its folder, and how it is read.

    Args:
        name: digits or fashion-mnist (held in memory, as they are); cifar10 or cifar100; or image-folder:
            ImageNet-2012, or any images in its shape. Of masked-lm python-text, the text that every Python carries, or
            corpus, a folder that `torch-thor prepare` has written.
        root: The folder that holds the files, or for image-folder the splits (it must be given before training). For
            all others `None` is ~/.cache/torch-thor, and for fashion-mnist Debian's package too.
        download: Whether missing files may be downloaded (image-folder never is).
        transform: Sizes and chances of crops; `None` is 224 pixels out of 256 for image-folder, 32 out of 32 for CIFAR,
            with the mean and deviation of ImageNet or CIFAR-10.
        workers: The processes that read and crop images, or make examples of a masked language model, for training and
            evaluation each. Not for what is in memory.
        max_broken: Greatest share of an epoch's images that may be broken.
        cache: Folder for decoded evaluation images, of image-folder only; `None` decodes at each evaluation.
        text: Length and masking of examples, of masked-lm only.
    """

    name: str = "digits"
    root: str | None = None
    download: bool = True
    transform: ImageTransform | None = None
    workers: Workers = field(default_factory=Workers)
    max_broken: float = 0.01
    cache: str | None = None
    text: TextSpec = field(default_factory=TextSpec)

    @property
    def crops(self) -> ImageTransform:
        """Sizes and chances, where images are cropped: what is given, or what the data set is usually read with."""
        return self.transform or (IMAGENET if self.name == FOLDER else CIFAR)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of an image as the network sees it."""
        return IN_MEMORY.get(self.name) or (3, self.crops.size, self.crops.size)

    def __post_init__(self) -> None:
        names = (*IN_MEMORY, *CIFAR_SETS, FOLDER, *TEXTS)
        require(self.name in names, f"data.name={self.name} is not a data set: use one of {', '.join(names)}")
        require(
            self.transform is None or self.name not in (*IN_MEMORY, *TEXTS),
            f"data.transform is set: {self.name} is trained on as it is; leave data.transform=null",
        )
        require(
            self.cache is None or self.name == FOLDER,
            f"data.cache={self.cache}: {self.name} is in memory already; leave data.cache=null",
        )
        require(
            0 <= self.max_broken < 1,
            f"data.max_broken={self.max_broken} must be a share in [0, 1); 0 allows no broken image",
        )
