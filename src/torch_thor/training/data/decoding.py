"""Decoding image files to RGB tensors. The format is taken from the content of a file, not from its name.

Pillow reads every header: the format, the size (more than 179 million pixels are taken for damage, before any memory is
asked for) and, of a PNG, the checksums of all its parts. JPEG is then decoded by torchvision, in two thirds of Pillow's
time; all else by Pillow. torchvision's decoder of PNG must not be used: a damaged file ends the process with a
segmentation fault, in libpng's error handling. Its GIF decoder decodes every frame of an animation to give one.

Grey-scale, palette, CMYK and transparent images become RGB with the very pixels that Pillow's `convert("RGB")` gives.
Orientation tags are left alone, as in the reference trainings on ImageNet.
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
# An image is read or it is broken. What Pillow says besides, of half as many pixels or of transparent palettes, every
# worker would say again.
warnings.filterwarnings("ignore", module=r"PIL\b")
# Else a sound PNG with more than 1 MB of compressed remarks, as Photoshop writes them, would be refused.
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY


class BrokenImageError(Exception):
    """A file that holds no image that can be decoded; the message is the reason, without the path."""


def decode_rgb(content: bytes) -> Tensor:
    """Decode one image. No content can end the process.

    Args:
        content: The whole file.

    Returns:
        (3, height, width), uint8. Of an animation the first frame; of 16 bits a channel the upper 8; an alpha channel
        is dropped, not blended.

    Raises:
        BrokenImageError: If the content is empty, cut short, damaged, or no image.
        MemoryError: If there is not enough memory for the image.
    """
    if not content:
        raise BrokenImageError("the file is empty")
    try:
        with Image.open(io.BytesIO(content)) as image:
            kind = image.format
            image.verify()  # of PNG alone Pillow verifies anything; the image cannot be decoded after it
        if kind == "EPS":  # Pillow would have Ghostscript run the file, which is a program
            raise BrokenImageError("PostScript is not an image format that is read")
        if kind in {"JPEG", "MPO"}:
            try:
                return _jpeg(content)
            except RuntimeError:  # cut short, or a kind of JPEG that it does not know: Pillow tells the two apart
                pass
        return _by_pillow(content)
    except (BrokenImageError, MemoryError):
        raise
    except UnidentifiedImageError as error:  # its own message is an object's address
        raise BrokenImageError("no image format that torchvision or Pillow knows") from error
    except Exception as error:  # damaged bytes make Pillow's plugins raise nearly anything
        raise BrokenImageError(" ".join(str(error).split()) or type(error).__name__) from error


def _jpeg(content: bytes) -> Tensor:
    image: Tensor = decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8), ImageReadMode.RGB)
    return image


def _by_pillow(content: bytes) -> Tensor:
    with Image.open(io.BytesIO(content)) as image:
        # Pillow's own conversion would make all from 256 on white; "I" is what Pillow before 11.3 calls it too
        if image.mode.startswith("I;16") or (image.mode == "I" and image.format in {"PNG", "PPM"}):
            upper: Tensor = functional.pil_to_tensor(image).to(torch.int32) >> 8
            return upper.to(torch.uint8).permute(1, 2, 0).repeat(1, 1, 3).permute(2, 0, 1)
        tensor: Tensor = functional.pil_to_tensor(image.convert("RGB"))
    return tensor
