"""Every kind of file that ImageNet holds becomes the RGB that Pillow gives; what is broken is refused with a reason."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from torch_thor.training.data import BrokenImageError, decode_rgb

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")


def photograph():
    return Image.fromarray(load_sample_images().images[0]).crop((100, 100, 260, 220))


def encoded(image, kind="JPEG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def rgb(content):
    return torch.from_numpy(np.array(Image.open(io.BytesIO(content)).convert("RGB"))).permute(2, 0, 1)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("RGB", "JPEG"),
        ("L", "JPEG"),
        ("CMYK", "JPEG"),
        ("RGB", "PNG"),
        ("RGBA", "PNG"),
        ("LA", "PNG"),
        ("P", "PNG"),
        ("L", "PNG"),
        ("RGB", "WEBP"),
        ("P", "GIF"),
        ("RGB", "BMP"),  # from here on Pillow's part
        ("RGB", "TIFF"),
        ("RGB", "PPM"),
    ],
)
def test_every_kind_becomes_rgb(mode, kind):
    content = encoded(photograph().convert(mode), kind)
    image = decode_rgb(content)
    assert image.shape == (3, 120, 160)
    assert image.dtype == torch.uint8
    assert torch.equal(image, rgb(content))


def test_cmyk_has_the_colours_of_the_photograph():
    # Pillow is no oracle for its own files: the colours themselves must come back
    image = decode_rgb(encoded(photograph().convert("CMYK"), quality=95)).float()
    truth = torch.from_numpy(np.array(photograph())).permute(2, 0, 1).float()
    assert (image - truth).abs().mean() < 8


def test_sixteen_bits_are_scaled_to_eight():
    values = np.linspace(0, 65535, 256 * 4).round().astype(np.uint16).reshape(4, 256)
    image = decode_rgb(encoded(Image.fromarray(values), "PNG"))
    assert image.dtype == torch.uint8
    assert (image.double() - torch.from_numpy(values / 65535 * 255)).abs().max() <= 1


def test_an_animation_gives_its_first_frame():
    frames = [photograph().convert("P"), photograph().transpose(Image.Transpose.FLIP_LEFT_RIGHT).convert("P")]
    content = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert torch.equal(decode_rgb(content), rgb(content))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.97])
def test_files_cut_short_are_broken(kind, share):
    content = encoded(photograph(), kind)
    with pytest.raises(BrokenImageError) as caught:
        decode_rgb(content[: int(share * len(content))])
    reason = str(caught.value)
    assert reason
    assert "\n" not in reason
    assert "0x" not in reason


def test_what_is_no_image_is_broken():
    with pytest.raises(BrokenImageError, match="no image format"):
        decode_rgb(b"this is no image" * 20)
    with pytest.raises(BrokenImageError, match="empty"):
        decode_rgb(b"")
