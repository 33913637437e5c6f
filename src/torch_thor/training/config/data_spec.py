"""The settings of the data in a recipe: the data set, its folder, and how its images are read."""

from dataclasses import dataclass, field
from pathlib import Path

from torch_thor.training.config.text_spec import TextSpec
from torch_thor.training.errors import require

IN_MEMORY = {"digits": (1, 8, 8), "fashion-mnist": (1, 28, 28)}  # shapes of their images
FOLDER = "image-folder"
CIFAR_SETS = ("cifar10", "cifar100")
PYTHON_TEXT, CORPUS = "python-text", "corpus"
TEXTS = (PYTHON_TEXT, CORPUS)
CACHE = Path("~/.cache/torch-thor")  # for data sets that are downloaded or prepared, if a recipe names no folder

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True, kw_only=True)
class ImageTransform:
    """How images are cropped, flipped and normalised.

    Args:
        size: Height and width of the network's input, in pixels.
        resize: Length of the shorter side before the centre crop of evaluation, in pixels.
        scale: Smallest and largest fraction of the image's area that a random training crop covers.
        ratio: Smallest and largest aspect ratio (width / height) of a random training crop.
        flip: Probability of a horizontal flip.
        padding: `None` uses random resized crops. A number pads the image with that many black pixels on each side
            and takes a random crop of `size`, as is usual on CIFAR; `scale` and `ratio` then have no effect.
        mean: Mean of each channel, for pixel values in [0, 1]; it is subtracted.
        std: Standard deviation of each channel, for pixel values in [0, 1]; images are divided by it.
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
        require(self.size >= 1, f"data.transform.size={self.size} must be 1 pixel or more")
        require(
            self.resize >= self.size,
            f"data.transform.resize={self.resize} must be data.transform.size={self.size} or more: the centre is "
            "cropped from it",
        )
        require(
            0 < self.scale[0] <= self.scale[1] <= 1,
            f"data.transform.scale={list(self.scale)} must be two fractions of the area, 0 < smallest <= largest <= 1",
        )
        require(
            0 < self.ratio[0] <= self.ratio[1],
            f"data.transform.ratio={list(self.ratio)} must be two ratios of width to height, 0 < smallest <= largest",
        )
        require(0 <= self.flip <= 1, f"data.transform.flip={self.flip} must be a probability in [0, 1]")
        require(
            self.padding is None or self.padding >= 0,
            f"data.transform.padding={self.padding} must be 0 pixels or more; null uses random resized crops",
        )
        require(all(value > 0 for value in self.std), f"data.transform.std={list(self.std)} must be above 0")


IMAGENET = ImageTransform()
CIFAR = ImageTransform(size=32, resize=32, mean=CIFAR_MEAN, std=CIFAR_STD)


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The worker processes that read and crop images, or make the examples of a masked language model.

    Args:
        count: Number of worker processes; 0 does the work in the training process. The batches are the same for any
            number.
        prefetch: Batches that each worker prepares ahead.
    """

    count: int = 4
    prefetch: int = 2

    def __post_init__(self) -> None:
        require(self.count >= 0, f"data.workers.count={self.count} must be 0 or more; 0 reads in the training process")
        require(self.prefetch >= 1, f"data.workers.prefetch={self.prefetch} must be 1 batch or more")


@dataclass(frozen=True)
class DataSpec:
    """The data set, its folder, and how it is read.

    Args:
        name: The data set. Images: digits or fashion-mnist (kept in memory, without crops), cifar10, cifar100, or
            image-folder (ImageNet-2012, or other images in folders of the same layout). Text, for task masked-lm:
            python-text (the documentation that is part of Python), or corpus (a folder that `torch-thor prepare` has
            written).
        root: The folder that contains the files; for image-folder, the folder that contains the training and the
            evaluation folder. image-folder and corpus need it. For the others `None` stands for ~/.cache/torch-thor;
            fashion-mnist is then also looked for in Debian's package dataset-fashion-mnist.
        download: Whether missing files may be downloaded. Nothing is ever downloaded for image-folder.
        transform: Crops, flips and normalisation. `None` stands for 224 pixels out of 256 for image-folder and 32 out
            of 32 for CIFAR, with the mean and standard deviation of ImageNet and CIFAR-10 respectively.
        workers: The processes that read and crop images, or make the examples of a masked language model. Training and
            evaluation each have this many. Data sets that are kept in memory have none.
        max_broken: Largest fraction of an epoch's images that may be unreadable; more of them are an error.
        cache: Folder for a cache of decoded evaluation images, for image-folder only; `None` decodes the images in each
            evaluation.
        text: Length and masking of examples, for task masked-lm only.
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
        """The transform that is given, or the usual one of the data set; for data sets whose images are cropped."""
        return self.transform or (IMAGENET if self.name == FOLDER else CIFAR)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of an image as the network sees it."""
        return IN_MEMORY.get(self.name) or (3, self.crops.size, self.crops.size)

    def folder(self) -> Path:
        """Return the folder of the files.

        Returns:
            `root`, or the default cache if it is `None`.
        """
        return CACHE.expanduser() if self.root is None else Path(self.root)

    def __post_init__(self) -> None:
        names = (*IN_MEMORY, *CIFAR_SETS, FOLDER, *TEXTS)
        require(self.name in names, f"data.name={self.name} is not a data set: use one of {', '.join(names)}")
        require(
            self.transform is None or self.name not in (*IN_MEMORY, *TEXTS),
            f"data.transform is set, but {self.name} is used without crops: leave data.transform=null",
        )
        require(
            self.cache is None or self.name == FOLDER,
            f"data.cache={self.cache}: {self.name} is in memory already; leave data.cache=null",
        )
        require(
            0 <= self.max_broken < 1,
            f"data.max_broken={self.max_broken} must be a fraction in [0, 1); 0 allows no broken image",
        )
