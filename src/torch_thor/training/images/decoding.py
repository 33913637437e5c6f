"""Bytes of an image file to an RGB tensor.

torchvision's decoder reads JPEG, PNG, GIF and WebP; grey-scale, palette, CMYK and transparent images become RGB
with the very pixels that Pillow's `convert("RGB")` gives. What it refuses is tried once more with Pillow, which knows
more formats (BMP, TIFF, PPM); a file that both refuse is broken. Orientation tags are left alone, as in the reference
trainings on ImageNet.
"""

import io

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torchvision.io import decode_image
from torchvision.transforms.v2 import functional


class BrokenImageError(Exception):
    """A file that holds no image that can be decoded; the message is the reason, without the path."""


def decode_rgb(content: bytes) -> Tensor:
    """Decode one image.

    Args:
        content: The whole file.

    Returns:
        (3, height, width), uint8. Of an animation the first frame; 16 bits a channel are scaled to 8; an alpha
        channel is dropped, not blended.

    Raises:
        BrokenImageError: If the content is empty, cut short, or no image.
    """
    if not content:
        raise BrokenImageError("the file is empty")
    try:
        image: Tensor = decode_image(torch.frombuffer(bytearray(content), dtype=torch.uint8), "RGB")
    except RuntimeError:  # a format it does not know, or a file cut short: Pillow tells the two apart
        return _by_pillow(content)
    if image.ndim == 4:
        image = image[0]
    if image.dtype != torch.uint8:
        image = functional.to_dtype(image, torch.uint8, scale=True)
    return image


def _by_pillow(content: bytes) -> Tensor:
    try:
        with Image.open(io.BytesIO(content)) as image:
            tensor: Tensor = functional.pil_to_tensor(image.convert("RGB"))
    except UnidentifiedImageError as error:  # its own message is an object's address
        raise BrokenImageError("no image format that torchvision or Pillow knows") from error
    except Exception as error:  # damaged bytes make Pillow's plugins raise nearly anything
        raise BrokenImageError(" ".join(str(error).split()) or type(error).__name__) from error
    return tensor
