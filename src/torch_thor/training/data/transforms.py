"""The transforms of images between the decoder and the network.

Training: a random resized crop and a random flip (He et al. 2016, section 3.4, in torchvision's form). Evaluation: the
shorter side is resized and the centre cropped. Both return uint8. The normalisation is a module that runs on the
device, so that only a quarter of the bytes are copied there.

The random numbers of a training crop are a function of (seed, epoch, index of the image). They do not depend on the
number of workers or processes, or on where a run was resumed.
"""

import hashlib

import torch
from torch import Tensor, nn
from torchvision.transforms import v2

from torch_thor.training.config.data_spec import ImageTransform
from torch_thor.training.data.decoding import MAX_PIXELS, BrokenImageError


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """Return the seed of one image's crop.

    Args:
        seed: The run's seed.
        epoch: Number of the epoch, from 0.
        index: The image's index in its data set.

    Returns:
        A seed of 63 bits.
    """
    digest = hashlib.sha256(f"{seed},{epoch},{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class TrainingTransform:
    """A random crop and a random flip.

    Args:
        options: The settings of the crop and the flip.
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
        """Crop one image. The state of the global random number generators does not change.

        Args:
            image: (3, height, width), uint8.
            epoch: Number of the epoch, from 0.
            index: The image's index in its data set.

        Returns:
            (3, size, size), uint8.
        """
        with torch.random.fork_rng(devices=[]):
            # torch.manual_seed would also seed the CUDA generators, which this fork_rng does not restore
            torch.default_generator.manual_seed(sample_seed(self.seed, epoch, index))
            cropped: Tensor = self.pipeline(image)
        return cropped


class EvaluationTransform:
    """Resizes the shorter side and crops the centre.

    Args:
        options: The settings of the crop.
    """

    def __init__(self, options: ImageTransform) -> None:
        self.size, self.resize = options.size, options.resize
        self.pipeline = v2.Compose([v2.Resize(options.resize, antialias=True), v2.CenterCrop(options.size)])

    def __call__(self, image: Tensor, epoch: int, index: int) -> Tensor:
        """Crop one image.

        Args:
            image: (3, height, width), uint8.
            epoch: Not used.
            index: Not used.

        Returns:
            (3, size, size), uint8.

        Raises:
            BrokenImageError: If the image is so narrow that resizing its shorter side would need gigabytes.
        """
        height, width = image.shape[1:]
        if self.resize**2 * max(height, width) > MAX_PIXELS * min(height, width):
            raise BrokenImageError(f"{width} × {height} pixels are too narrow to be resized")
        cropped: Tensor = self.pipeline(image)
        return cropped


class Normalize(nn.Module):
    """Converts uint8 images to float32 and normalises each channel, on the device of the images.

    Args:
        mean: Mean of each channel, for pixel values in [0, 1].
        std: Standard deviation of each channel, for pixel values in [0, 1].
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
