"""What happens to an image between the decoder and the network.

Training: random resized crop, flip (He et al. 2016, section 3.4, in torchvision's form). Evaluation: the shorter side
resized, the centre cropped. Both give uint8; normalisation is a module that runs on the device, so that a quarter of
the bytes travel there.

The randomness of a training crop is a function of (seed, epoch, index of the image): neither the number of workers nor
processes nor where a run was resumed can change it.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchvision.transforms import v2

from torch_thor.training.errors import require

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


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """The seed of one image's crop.

    Args:
        seed: The run's seed.
        epoch: Number of the epoch, from 0.
        index: The image's number in its set.

    Returns:
        63 bits.
    """
    digest = hashlib.sha256(f"{seed},{epoch},{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class TrainingTransform:
    """Random crop and flip.

    Args:
        options: Sizes and chances.
        seed: The run's seed.
    """

    def __init__(self, options: ImageTransform, seed: int) -> None:
        self.size, self.seed = options.size, seed
        crop: nn.Module
        if options.padding is None:
            crop = v2.RandomResizedCrop(options.size, scale=options.scale, ratio=options.ratio, antialias=True)
        else:
            crop = v2.RandomCrop(options.size, padding=options.padding, pad_if_needed=True)
        self.pipeline = v2.Compose([crop, v2.RandomHorizontalFlip(options.flip)])

    def __call__(self, image: Tensor, epoch: int, index: int) -> Tensor:
        """Crop one image; the global random numbers are left as they were.

        Args:
            image: (3, height, width), uint8.
            epoch: Number of the epoch, from 0.
            index: The image's number in its set.

        Returns:
            (3, size, size), uint8.
        """
        with torch.random.fork_rng(devices=[]):
            # torch.manual_seed would seed the CUDA generators too, which fork_rng does not put back here
            torch.default_generator.manual_seed(sample_seed(self.seed, epoch, index))
            cropped: Tensor = self.pipeline(image)
        return cropped


class EvaluationTransform:
    """Resize the shorter side, crop the centre.

    Args:
        options: Sizes.
    """

    def __init__(self, options: ImageTransform) -> None:
        self.size, self.resize = options.size, options.resize
        self.pipeline = v2.Compose([v2.Resize(options.resize, antialias=True), v2.CenterCrop(options.size)])

    def __call__(self, image: Tensor, epoch: int, index: int) -> Tensor:
        """Crop one image.

        Args:
            image: (3, height, width), uint8.
            epoch: Makes no difference.
            index: Makes no difference.

        Returns:
            (3, size, size), uint8.
        """
        cropped: Tensor = self.pipeline(image)
        return cropped


class Normalize(nn.Module):
    """uint8 to float32 with mean 0 and deviation 1 a channel, on the device where the images are.

    Args:
        mean: Of each channel, for pixels in [0, 1].
        std: Of each channel, for pixels in [0, 1].
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values).mul(255).view(1, -1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Normalise a batch.

        Args:
            images: (N, C, H, W), uint8.

        Returns:
            The same shape and memory format, float32.
        """
        return images.to(self.mean.dtype).sub_(self.mean).div_(self.std)
