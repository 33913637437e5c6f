"""Reading and decoding image files to RGB tensors.

The content of a file determines its format, not its name.

Pillow reads every header: the format, the size (more than 179 million pixels count as damage,
before any memory is allocated) and, for PNG, the checksums of all chunks. torchvision then decodes
JPEG, in two thirds of Pillow's time, and Pillow decodes all other formats. torchvision's PNG
decoder must not be used: a damaged file ends the process with a segmentation fault in libpng.
Greyscale, palette, CMYK and transparent images become RGB with the same pixels as Pillow's
`convert("RGB")`, which would make black or white images of deep ones: those are scaled here.
Orientation tags are ignored, as in the reference trainings on ImageNet.
"""

import errno
import io
import math
import re
import stat
import warnings
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image, PngImagePlugin, TiffImagePlugin, UnidentifiedImageError
from torch import Tensor
from torchvision.io import decode_jpeg
from torchvision.io.image import ImageReadMode
from torchvision.transforms.v2.functional import pil_to_tensor

from torch_thor.errors import UserError

LEAST_GREYS = 16  # of what is scaled by its own range, unless it has fewer different values
MAX_BYTES = 2**31  # such an image needs less in any format
# the machine lacks resources; the image itself may be valid
SCARCE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
# An image is either decoded or broken. Every worker would repeat Pillow's warnings about large
# images and palettes.
warnings.filterwarnings("ignore", module=r"PIL\b")
# Without this, valid PNG files with more than 1 MB of compressed text, as Photoshop writes them,
# would be refused.
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY


# EPS is a program, which Pillow would execute with Ghostscript; of the others Pillow knows the
# header only.
_NOT_DECODED = {"EPS", "MPEG", "BUFR", "GRIB", "HDF5", "WMF"}


class BrokenImageError(Exception):
    """A file cannot be read as an image. The message is the reason, without the path."""


@cache
def image_suffixes() -> tuple[str, ...]:
    """Return the suffixes, such as `.jpg`, of the formats that can be decoded."""
    known = Image.registered_extensions()
    return tuple(
        suffix for suffix, kind in known.items() if kind in Image.OPEN and kind not in _NOT_DECODED
    )


@cache
def _signed() -> tuple[str, ...]:
    """The formats that can be decoded and are told from the first bytes of a file."""
    Image.init()
    return tuple(
        kind for kind, (_, accepts) in Image.OPEN.items() if accepts and kind not in _NOT_DECODED
    )


def is_image(path: Path) -> bool:
    """Return whether a regular file has the header of an image, whatever its name.

    Raises:
        OSError: If it cannot be opened.
    """
    with path.open("rb") as file:
        try:
            with Image.open(file, formats=_signed()):
                return True
        except Image.DecompressionBombError:  # too large an image, which reading it will tell
            return True
        except Exception as error:  # Pillow's plugins raise many kinds of errors for what is none
            if isinstance(error, OSError) and error.errno is not None:
                raise
            return False


def read_image(path: Path) -> bytes:
    """Read a file, if it is a regular file that can contain an image."""
    try:
        status = path.stat()
        # opening a pipe waits for its writer, and a device may never end
        if not stat.S_ISREG(status.st_mode):
            raise BrokenImageError("it is not a regular file")
        if status.st_size > MAX_BYTES:
            raise BrokenImageError(f"{status.st_size / 1e9:.1f} GB are too much for an image")
        return path.read_bytes()
    # The file was removed since the folder was listed, it is a dangling link, or the disk fails.
    except OSError as error:
        reason = error.strerror or type(error).__name__
        if error.errno in SCARCE:
            raise UserError(
                f"{path} cannot be opened ({reason}): lower data.workers.count, or raise the limit "
                "(ulimit -n); then continue with --resume"
            ) from error
        raise BrokenImageError(reason) from error


def decode_rgb(content: bytes) -> Tensor:
    """Decode an image. No content can crash the process.

    Returns:
        (3, height, width), uint8. An animation gives its first frame, deep greys are scaled to
        8 bits, 16 bits of a colour are reduced to the upper 8, and an alpha channel is dropped
        without blending.

    Raises:
        BrokenImageError: If the content is truncated, damaged, or not an image.
        MemoryError: If there is not enough memory for the image.
    """
    try:
        with Image.open(io.BytesIO(content)) as image:
            kind = image.format
            image.verify()  # verifies PNG only; the image cannot be decoded afterwards
        if kind == "EPS":
            raise BrokenImageError("PostScript files are not supported")
        if kind in {"JPEG", "MPO"}:
            try:
                raw = torch.frombuffer(bytearray(content), dtype=torch.uint8)
                return cast(Tensor, decode_jpeg(raw, ImageReadMode.RGB))
            # It is truncated, or of a kind that torchvision lacks: Pillow tells them apart.
            except RuntimeError:
                pass
        with Image.open(io.BytesIO(content)) as image:
            # Pillow reads the bytes of negative values as bright ones
            if image.mode == "L" and _tag(image, TiffImagePlugin.SAMPLEFORMAT) == (2,):
                raise BrokenImageError("its 8-bit values are signed: convert it to unsigned ones")
            if image.mode.startswith(("I", "F")):
                grey = torch.from_numpy(_scaled(image)).unsqueeze(2)
                return grey.repeat(1, 1, 3).permute(2, 0, 1)
            # Pillow reads only the upper 8 bits of a colour of 16 bits, and forgets it afterwards.
            deep = re.search(";16[BLN]", str(image.tile)) is not None
            pixels = cast(Tensor, pil_to_tensor(image.convert("RGB")))
            if deep and pixels.max() < 16:
                raise BrokenImageError(
                    "its colours of 16 bits are all below 4096, so it would be black: convert it "
                    "to 8 bits"
                )
            return pixels
    except (BrokenImageError, MemoryError):
        raise
    except UnidentifiedImageError as error:  # its message contains only the address of an object
        raise BrokenImageError("no image format that Pillow knows") from error
    except Exception as error:  # Pillow's plugins raise many kinds of errors for damaged bytes
        raise BrokenImageError(" ".join(str(error).split()) or type(error).__name__) from error


def _tag(image: Image.Image, tag: int) -> Any:
    """Return a tag of a TIFF file, or None."""
    return image.tag_v2.get(tag) if isinstance(image, TiffImagePlugin.TiffImageFile) else None


def _scaled(image: Image.Image) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Scale an image of deep greys to (height, width)."""
    # in such an image the largest value is black; Pillow inverts those of 8 bits alone
    white_is_zero = _tag(image, TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0
    grey = _by_depth(image)
    return 255 - grey if white_is_zero else grey


def _by_depth(image: Image.Image) -> np.ndarray[Any, np.dtype[np.uint8]]:
    values = np.asarray(image)
    if image.format == "FITS" and image.mode.startswith("I;16"):  # its integers are signed
        return _stretched(values.astype(np.uint16).view(np.int16).astype(np.float64))
    # before 11.3 Pillow calls some images of 16 bits "I"
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in {"PNG", "PPM"}):
        # many cameras use 12 of the 16 bits
        bits = next(bits for bits in (8, 12, 16) if values.max() < 2**bits)
        return (values.astype(np.int32) >> bits - 8).astype(np.uint8)
    if image.mode == "I" and isinstance(image, TiffImagePlugin.TiffImageFile):
        unsigned = _tag(image, TiffImagePlugin.SAMPLEFORMAT) in (None, (1,))
        values = values.view(np.uint32) if unsigned else values
    return _stretched(values.astype(np.float64))


def _stretched(values: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Scale integers of 32 bits or floats, which have no white of their own, by their range."""
    low, high = float(values.min()), float(values.max())
    span = f"its 32-bit or float values, from {low:g} to {high:g},"
    if not math.isfinite(high - low):
        raise BrokenImageError(f"{span} are not all finite: convert it to 8 or 16 bits")
    if low == high:
        raise BrokenImageError(f"{span} are all equal, which tells no grey: convert it to 8 bits")
    scaled: np.ndarray[Any, np.dtype[np.uint8]]
    scaled = ((values - low) * (255 / (high - low))).round().astype(np.uint8)
    greys = np.unique(scaled).size
    if greys < LEAST_GREYS and greys < np.unique(values).size:
        raise BrokenImageError(
            f"{span} would make it black or white but for a few pixels: convert it to 8 or 16 bits"
        )
    return scaled
