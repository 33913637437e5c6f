"""No content of a file ends the process that decodes it; sound files give the pixels of torchvision's decoder."""

import io
import random
import struct
from pathlib import Path

import pytest
import torch
from PIL import Image, PngImagePlugin
from sklearn.datasets import load_sample_images
from torchvision.io import decode_image

import damage
from command_line import command
from torch_thor.training.data import IMAGENET, BrokenImageError, EvaluationTransform, decode_rgb

pytestmark = pytest.mark.filterwarnings(
    "ignore:The image decoding:DeprecationWarning", "ignore:Palette images with Transparency:UserWarning"
)
PNGS = [
    (color, depth, interlaced, transparent)
    for color, depths in damage.DEPTHS.items()
    for depth in depths
    for interlaced in (False, True)
    for transparent in ((False, True) if color in damage.TRANSPARENT else (False,))
]


def photograph():
    return Image.fromarray(load_sample_images().images[0]).crop((100, 100, 196, 164))


def encoded(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def samples():
    """One sound file of every kind."""
    picture = photograph()
    turned = picture.rotate(180)
    yield "jpeg", encoded(picture, "JPEG")
    yield "progressive jpeg", encoded(picture, "JPEG", progressive=True)
    yield "cmyk jpeg", encoded(picture.convert("CMYK"), "JPEG")
    yield "grey jpeg", encoded(picture.convert("L"), "JPEG")
    yield "gif", encoded(picture.convert("P"), "GIF")
    yield "animated gif", encoded(picture.convert("P"), "GIF", save_all=True, append_images=[turned.convert("P")])
    yield "transparent gif", encoded(picture.convert("P"), "GIF", transparency=5)
    yield "webp", encoded(picture, "WEBP")
    yield "lossless webp", encoded(picture, "WEBP", lossless=True)
    yield "transparent webp", encoded(Image.merge("RGBA", (*picture.split(), turned.convert("L"))), "WEBP")
    yield "bmp", encoded(picture, "BMP")
    yield "tiff", encoded(picture, "TIFF")
    yield "compressed tiff", encoded(picture, "TIFF", compression="tiff_lzw")
    yield "ppm", encoded(picture, "PPM")
    yield "photograph png", encoded(picture, "PNG")
    yield "animated png", encoded(picture, "PNG", save_all=True, append_images=[turned])
    for kind in PNGS:
        color, depth, interlaced, transparent = kind
        yield f"png {kind}", damage.png(color, depth, interlaced=interlaced, transparent=transparent)


SAMPLES = dict(samples())


def decode_damaged(seed, count):
    """What happens in a process of its own; of a PNG nothing but the true pixels may come out of a damaged file."""
    for name, content in SAMPLES.items():
        truth, chance = decode_rgb(content), random.Random(f"{name} {seed}")
        for number in range(count):
            spoiled = damage.damaged(content, chance)
            print(f"{name}, damage {number} of seed {seed}", flush=True)  # the last line tells what has killed it
            try:
                image = decode_rgb(spoiled)
            except BrokenImageError as error:
                reason = str(error)
            else:
                reason = "none"
                assert image.dtype == torch.uint8
                assert image.shape[0] == 3
                assert "png" not in name or torch.equal(image, truth), name
            assert reason
            assert "\n" not in reason


def in_a_process(folder, script):
    """A script that may kill its process: (exit code, stdout, stderr)."""
    path = [str(Path(__file__).parent), str(Path(damage.__file__).parent)]
    (folder / "script.py").write_text(
        f"import sys\nsys.path[:0] = {path}\nimport test_decoding_damaged_files as here\n{script}\n"
    )
    return command(folder, script=folder / "script.py")


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_no_damage_ends_the_process(tmp_path, seed):
    code, out, err = in_a_process(tmp_path, f"here.decode_damaged({seed}, 100)")
    assert code == 0, f"{out.splitlines()[-1]}\n{err[-2000:]}"
    assert len(out.splitlines()) == 100 * len(SAMPLES)


@pytest.mark.parametrize("name", [name for name in SAMPLES if not name.endswith(("tiff", "ppm", "bmp"))])
def test_sound_files_give_the_pixels_and_the_layout_of_torchvisions_decoder(name):
    content = torch.frombuffer(bytearray(SAMPLES[name]), dtype=torch.uint8)
    truth = decode_image(content, "RGB")  # safe with what is sound
    if truth.ndim == 4:
        truth = truth[0]
    if truth.dtype == torch.uint16:
        truth = (truth.to(torch.int32) >> 8).to(torch.uint8)
    image = decode_rgb(SAMPLES[name])
    assert torch.equal(image, truth)
    assert image.stride() == truth.stride()  # resizing takes other paths for other layouts


@pytest.mark.parametrize("kind", ["TIFF", "PPM"])
def test_sixteen_bits_are_scaled_in_every_format(kind):
    values = torch.arange(0, 65536, 64, dtype=torch.int32).view(32, 32)
    image = Image.fromarray(values.to(torch.uint16).numpy())
    assert torch.equal(decode_rgb(encoded(image, kind)), (values >> 8).to(torch.uint8).expand(3, -1, -1))


def sized(content, marker, offset, layout, *size):
    """The same file with another size in its header."""
    spoiled, place = bytearray(content), content.index(marker) + offset
    spoiled[place : place + struct.calcsize(layout)] = struct.pack(layout, *size)
    return bytes(spoiled)


BOMBS = {
    "png": damage.png(2, 8, stated=(30_000, 30_000)),
    "largest png": damage.png(2, 8, stated=(2**31 - 1, 2**31 - 1)),
    "jpeg": sized(SAMPLES["jpeg"], b"\xff\xc0", 5, ">HH", 65_500, 65_500),
    "progressive jpeg": sized(SAMPLES["progressive jpeg"], b"\xff\xc2", 5, ">HH", 65_500, 65_500),
    "gif": sized(SAMPLES["gif"], b"GIF8", 6, "<HH", 65_535, 65_535),
    "bmp": sized(SAMPLES["bmp"], b"BM", 18, "<ii", 60_000, 60_000),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_header_that_claims_gigabytes_is_damage(name, monkeypatch):
    # where memory is taken the process may be killed: nothing may be decoded at all
    for decoder in ("decode_jpeg", "functional"):
        monkeypatch.setattr(f"torch_thor.training.data.decoding.{decoder}", None)
    with pytest.raises(BrokenImageError, match=r"Image size \(\d+ pixels\) exceeds limit of 178956970 pixels"):
        decode_rgb(BOMBS[name])


@pytest.mark.slow
def test_large_and_transparent_images_are_read_without_a_word(tmp_path):
    # more than the 89 million pixels that Pillow warns of, and a palette with many shades of transparency
    large = "here.decode_rgb(here.encoded(here.Image.new('L', (10_000, 9_000)), 'PNG'))"
    palette = "here.decode_rgb(here.damage.png(3, 8, transparent=True))"
    assert in_a_process(tmp_path, f"print(*{large}.shape, *{palette}.shape)") == (0, "3 9000 10000 3 23 37\n", "")


def test_every_flipped_bit_of_a_png_is_noticed():
    content, chance = SAMPLES["photograph png"], random.Random(0)
    for _ in range(200):
        with pytest.raises(BrokenImageError):
            decode_rgb(damage.flipped(content, chance, count=1))


def test_a_png_may_hold_long_remarks():
    remarks = PngImagePlugin.PngInfo()
    remarks.add_itxt("XML:com.adobe.xmp", "x" * 3_000_000, zip=True)
    picture = photograph()
    assert torch.equal(decode_rgb(encoded(picture, "PNG", pnginfo=remarks)), decode_rgb(encoded(picture, "PNG")))


def test_a_program_is_no_image():
    with pytest.raises(BrokenImageError, match="PostScript"):
        decode_rgb(encoded(photograph(), "EPS"))


def test_no_memory_is_no_fault_of_the_image(monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr("torch_thor.training.data.decoding.functional.pil_to_tensor", fail)
    with pytest.raises(MemoryError):
        decode_rgb(SAMPLES["photograph png"])


def test_an_image_of_one_line_is_not_resized_to_gigabytes():
    crop = EvaluationTransform(IMAGENET)
    assert crop(torch.zeros(3, 1, 2_000, dtype=torch.uint8), 0, 0).shape == (3, 224, 224)
    with pytest.raises(BrokenImageError, match="60000 × 1 pixels are too narrow"):
        crop(torch.zeros(3, 1, 60_000, dtype=torch.uint8), 0, 0)
