"""Decoding image files to RGB tensors. The content of a file determines the format, not its name.

Pillow reads every header: the format, the size (more than 179 million pixels count as damage, before any memory is
allocated) and, for PNG, the checksums of all chunks. torchvision then decodes JPEG, in two thirds of Pillow's time, and
Pillow decodes all other formats. torchvision's PNG decoder must not be used: a damaged file ends the process with a
segmentation fault in the error handling of libpng. Its GIF decoder decodes every frame of an animation to return one.

Greyscale, palette, CMYK and transparent images become RGB with the same pixels as Pillow's `convert("RGB")`.
Orientation tags are ignored, as in the reference trainings on ImageNet.
"""

import io
import warnings

import torch
from PIL import Image, PngImagePlugin, UnidentifiedImageError
from torch import Tensor
from torchvision.io import decode_jpeg
from torchvision.io.image import ImageReadMode
from torchvision.transforms.v2 import functional

MAX_PIXELS = 178_956_970  # Pillow refuses larger images
# An image is either decoded or broken. Every worker would repeat Pillow's warnings about large images and palettes.
warnings.filterwarnings("ignore", module=r"PIL\b")
# Without this, valid PNG files with more than 1 MB of compressed text, as Photoshop writes them, would be refused.
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY


class BrokenImageError(Exception):
    """A file cannot be decoded as an image. The message is the reason, without the path."""


def decode_rgb(content: bytes) -> Tensor:
    """Decode one image. No content can crash the process.

    Args:
        content: The content of the file.

    Returns:
        (3, height, width), uint8. An animation gives its first frame, 16 bits per channel are reduced to the upper 8,
        and an alpha channel is dropped without blending.

    Raises:
        BrokenImageError: If the content is empty, truncated, damaged, or not an image.
        MemoryError: If there is not enough memory for the image.
    """
    if not content:
        raise BrokenImageError("the file is empty")
    try:
        with Image.open(io.BytesIO(content)) as image:
            kind = image.format
            image.verify()  # verifies PNG only; the image cannot be decoded afterwards
        if kind == "EPS":  # a program, which Pillow would execute with Ghostscript
            raise BrokenImageError("PostScript files are not supported")
        if kind in {"JPEG", "MPO"}:
            try:
                return _jpeg(content)
            except (
                RuntimeError
            ):  # truncated, or a kind of JPEG that torchvision does not support: Pillow distinguishes the two
                pass
        return _by_pillow(content)
    except (BrokenImageError, MemoryError):
        raise
    except UnidentifiedImageError as error:  # its message contains only the address of an object
        raise BrokenImageError("no image format that torchvision or Pillow knows") from error
    except Exception as error:  # Pillow's plugins raise many kinds of errors for damaged bytes
        raise BrokenImageError(" ".join(str(error).split()) or type(error).__name__) from error


def _jpeg(content: bytes) -> Tensor:
    image: Tensor = decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8), ImageReadMode.RGB)
    return image


def _by_pillow(content: bytes) -> Tensor:
    with Image.open(io.BytesIO(content)) as image:
        # Pillow's conversion would make all values from 256 on white; Pillow before 11.3 calls some of these modes "I"
        if image.mode.startswith("I;16") or (image.mode == "I" and image.format in {"PNG", "PPM"}):
            upper: Tensor = functional.pil_to_tensor(image).to(torch.int32) >> 8
            return upper.to(torch.uint8).permute(1, 2, 0).repeat(1, 1, 3).permute(2, 0, 1)
        tensor: Tensor = functional.pil_to_tensor(image.convert("RGB"))
    return tensor
