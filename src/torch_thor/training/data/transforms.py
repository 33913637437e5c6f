"""What happens to an image between the decoder and the network.

Training: random resized crop, flip (He et al. 2016, section 3.4, in torchvision's form). Evaluation: the shorter side
resized, the centre cropped. Both give uint8; normalisation is a module that runs on the device, so that a quarter of
the bytes travel there.

The randomness of a training crop is a function of (seed, epoch, index of the image): neither the number of workers nor
processes nor where a run was resumed can change it.
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

        Raises:
            BrokenImageError: If the image is so narrow that resizing its shorter side would take gigabytes.
        """
        height, width = image.shape[1:]
        if self.resize**2 * max(height, width) > MAX_PIXELS * min(height, width):
            raise BrokenImageError(f"{width} × {height} pixels are too narrow to be resized")
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
