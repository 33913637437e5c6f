"""Every kind of file becomes the RGB of torchvision's decoder or Pillow's; damage is a reason, and
ends no process.
"""

import io
import random
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin
from sklearn.datasets import load_sample_images
from torchvision.io import decode_image

import damage
from command_line import command
from torch_thor.training.data.decoding import BrokenImageError, decode_rgb

pytestmark = pytest.mark.filterwarnings(
    "ignore:The image decoding:DeprecationWarning",
    "ignore:Palette images with Transparency:UserWarning",
)


def photograph():
    return Image.fromarray(load_sample_images().images[0]).crop((100, 100, 196, 164))


def encoded(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def samples():
    """One sound file of every kind."""
    picture, turned = photograph(), photograph().rotate(180)
    palette, exif = picture.convert("P"), Image.Exif()
    exif[0x0112] = 6  # an orientation
    for name, image, options in [
        ("jpeg", picture, {}), ("progressive jpeg", picture, {"progressive": True}),
        ("turned jpeg", picture, {"exif": exif}),
        ("cmyk jpeg", picture.convert("CMYK"), {}), ("grey jpeg", picture.convert("L"), {}),
        ("gif", palette, {}),
        ("animated gif", palette, {"save_all": True, "append_images": [turned.convert("P")]}),
        ("transparent gif", palette, {"transparency": 5}), ("webp", picture, {}),
        ("lossless webp", picture, {"lossless": True}),
        ("transparent webp", Image.merge("RGBA", (*picture.split(), turned.convert("L"))), {}),
        ("bmp", picture, {}),
        ("tiff", picture, {}), ("compressed tiff", picture, {"compression": "tiff_lzw"}),
        ("ppm", picture, {}),
        ("photograph png", picture, {}),
        ("animated png", picture, {"save_all": True, "append_images": [turned]}),
    ]:  # fmt: skip
        yield name, encoded(image, name.split()[-1], **options)
    for color, depths in damage.DEPTHS.items():
        for depth in depths:
            for interlaced in (False, True):
                for transparent in (False, True) if color in damage.TRANSPARENT else (False,):
                    content = damage.png(
                        color, depth, interlaced=interlaced, transparent=transparent
                    )
                    yield f"png {color, depth, interlaced, transparent}", content


SAMPLES = dict(samples())


def test_sound_files_give_the_pixels_and_the_layout_of_torchvisions_decoder():
    for name, content in SAMPLES.items():
        image = decode_rgb(content)
        assert image.dtype == torch.uint8
        if name.endswith(("tiff", "ppm", "bmp")):  # unknown to torchvision
            truth = torch.from_numpy(
                np.array(Image.open(io.BytesIO(content)).convert("RGB"))
            ).permute(2, 0, 1)
        else:  # safe with what is sound
            truth = decode_image(torch.frombuffer(bytearray(content), dtype=torch.uint8), "RGB")
        truth = truth[0] if truth.ndim == 4 else truth  # the first frame
        if truth.dtype == torch.uint16:
            truth = (truth.to(torch.int32) >> 8).to(torch.uint8)
        assert torch.equal(image, truth), name
        # resizing takes other paths for other layouts
        assert image.stride() == truth.stride(), name


def test_cmyk_has_the_colours_of_the_photograph():
    # the decoders are no oracles for these files: the colours themselves must come back
    image = decode_rgb(encoded(photograph().convert("CMYK"), "JPEG", quality=95)).float()
    assert (image - torch.from_numpy(np.array(photograph())).permute(2, 0, 1)).abs().mean() < 8


def expected_grey(values):
    return torch.from_numpy(np.asarray(values, dtype=np.uint8)).expand(3, -1, -1)


def tiff(values, order, sample_format=1, photometric=1):
    """A TIFF of one strip, in either byte order; where `photometric` is 0, so is white."""
    bits = 8 * values.itemsize
    data = values.astype(values.dtype.newbyteorder(order)).tobytes()
    height, width = values.shape
    tags = [(256, width), (257, height), (258, bits), (259, 1), (262, photometric), (273, 8),
    (277, 1), (278, height), (279, len(data)), (339, sample_format)]  # fmt: skip
    body = b"".join(struct.pack(f"{order}HHII", tag, 4, 1, value) for tag, value in tags)
    head = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HI", 42, 8 + len(data))
    return head + data + struct.pack(f"{order}H", len(tags)) + body + bytes(4)


def test_sixteen_bits_are_scaled_in_every_format_and_byte_order():
    values = np.arange(0, 65536, 64, dtype=np.uint16).reshape(32, 32)
    image = Image.fromarray(values)
    found = [encoded(image, kind) for kind in ("PNG", "TIFF", "PPM", "JPEG2000")]
    found += [encoded(image, "TIFF", compression="tiff_lzw"), tiff(values, "<"), tiff(values, ">")]
    for content in found:
        assert torch.equal(decode_rgb(content), expected_grey(values >> 8))


def test_the_bits_that_an_image_of_sixteen_uses_are_those_of_its_largest_value():
    ramp = np.arange(1024).reshape(32, 32)
    for values, expected in (
        (4 * ramp, 4 * ramp >> 4),
        (4 * ramp + 4, 4 * ramp + 4 >> 8),
        (ramp // 4, ramp // 4),
        (0 * ramp, 0 * ramp),
    ):
        for order in "<>":
            content = tiff(values.astype(np.uint16), order)
            assert torch.equal(decode_rgb(content), expected_grey(expected))


RAMP = np.linspace(0, 1, 1024).reshape(32, 32)


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize(
    ("values", "sample_format"),
    [
        (RAMP.astype(np.float32), 3), ((255 * RAMP).astype(np.float32), 3),
        ((4000 * RAMP - 9).astype(np.float32), 3), ((RAMP * 2**30).astype(np.int32), 2),
        ((RAMP * 65535).astype(np.int32), 2), ((RAMP * 1000 - 500).astype(np.int16), 2),
        ((RAMP * 2**31 - 2**30).astype(np.int32), 2), ((RAMP > 0.3).astype(np.float32), 3),
    ],
)  # fmt: skip
def test_integers_of_32_bits_and_floats_are_scaled_by_their_range(values, sample_format, order):
    low, high = float(values.min()), float(values.max())
    expected = np.round((values.astype(np.float64) - low) / (high - low) * 255)
    image = decode_rgb(tiff(values, order, sample_format))
    assert (image.to(torch.int32) - expected_grey(expected).to(torch.int32)).abs().max() <= 1
    assert (image.min(), image.max()) == (0, 255)


def test_unsigned_integers_of_32_bits_do_not_wrap():
    values = (RAMP * (2**32 - 1)).astype(np.uint32)
    assert torch.equal(decode_rgb(tiff(values, "<")), expected_grey(np.round(RAMP * 255)))


@pytest.mark.parametrize(
    ("dtype", "largest", "sample_format", "order"),
    [
        (np.uint8, 255, 1, "<"), (np.uint8, 255, 1, ">"),
        (np.uint16, 65535, 1, "<"), (np.uint16, 4095, 1, "<"),  # Pillow lacks the other order
        (np.float32, 1, 3, "<"), (np.float32, 1, 3, ">"),
    ],
)  # fmt: skip
def test_zero_is_white_where_the_file_says_so(dtype, largest, sample_format, order):
    values = (RAMP * largest).astype(dtype)
    white, black = (
        decode_rgb(tiff(values, order, sample_format, photometric)) for photometric in (0, 1)
    )
    assert torch.equal(white, 255 - black)
    assert (white[0, 0, 0], white[0, -1, -1]) == (255, 0)


@pytest.mark.parametrize("order", "<>")
def test_signed_values_of_eight_bits_are_broken(order):
    content = tiff((255 * RAMP - 128).astype(np.int8), order, 2)
    with pytest.raises(BrokenImageError, match="its 8-bit values are signed: convert it to u"):
        decode_rgb(content)


@pytest.mark.parametrize("zero", [0, 32768])
def test_fits_of_sixteen_bits_is_signed_and_scaled_by_its_range(zero):
    """Unsigned values are stored less 32768, which BZERO gives back."""
    values = (RAMP * 65535).round().astype(np.int32)
    fields = {"SIMPLE": "T", "BITPIX": 16, "NAXIS": 2, "NAXIS1": 32, "NAXIS2": 32, "BZERO": zero}
    cards = [f"{key:8}= {value:>20}".ljust(80) for key, value in fields.items()]
    data = (values - 32768).astype(">i2").tobytes()
    content = "".join([*cards, "END"]).ljust(2880).encode() + data.ljust(2880, b"\0")
    upwards = np.flipud(values)  # the first row is the lowest
    assert torch.equal(decode_rgb(content), expected_grey(np.round(upwards * (255 / 65535))))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (np.where(RAMP > 0.5, np.nan, RAMP), "from nan to nan, are not all finite: convert it"),
        (np.where(RAMP > 0.5, np.inf, RAMP), "from 0 to inf, are not all finite: convert it"),
        (0 * RAMP + 0.5, "from 0.5 to 0.5, are all equal, which tells no grey: convert it"),
        # a hot pixel, and pixels without data
        (np.where(RAMP == 1, 1e6, RAMP), "to 1e.06, would make it black or white but for a few"),
        (np.where(RAMP > 0.7, -9999, RAMP), "from -9999 to .* black or white .*: convert it to 8"),
    ],
)
def test_deep_greys_that_have_no_range_are_broken(values, said):
    with pytest.raises(BrokenImageError, match=f"^its 32-bit or float values, .*{said}"):
        decode_rgb(tiff(values.astype(np.float32), "<", 3))


def test_deep_colours_that_would_be_black_are_broken():
    """Pillow gives the upper 8 of their 16 bits, whatever the largest value is."""

    def png(largest):
        pixels = np.zeros((4, 5, 3), dtype=np.uint16)
        pixels[1, 2] = largest
        header = struct.pack(">IIBBBBB", 5, 4, 16, 2, 0, 0, 0)
        data = zlib.compress(b"".join(damage.rows(pixels, 16)))
        chunks = [(b"IHDR", header), (b"IDAT", data), (b"IEND", b"")]
        return b"\x89PNG\r\n\x1a\n" + b"".join(damage.chunk(*chunk) for chunk in chunks)

    assert decode_rgb(png(4096)).max() == 16
    with pytest.raises(BrokenImageError, match=r"16 bits are all below 4096, .* convert it to 8"):
        decode_rgb(png(4095))
    assert decode_rgb(encoded(Image.new("RGB", (4, 4)), "BMP")).max() == 0


def test_what_is_cut_short_or_no_image_is_broken():
    unknown = "no image format"
    wrong = [
        (b"", unknown),
        (b"no image" * 20, unknown),
        (encoded(photograph(), "EPS"), "PostScript"),
    ]
    for name in ("jpeg", "photograph png", "webp", "bmp"):
        wrong += [
            (SAMPLES[name][: int(share * len(SAMPLES[name]))], ".") for share in (0.01, 0.5, 0.97)
        ]
    for content, said in wrong:
        with pytest.raises(BrokenImageError, match=said) as caught:
            decode_rgb(content)
        assert "\n" not in str(caught.value)
        assert "0x" not in str(caught.value)


def decode_damaged(seed, count):
    """What happens in a process of its own; of a PNG nothing but the true pixels may come out of a
    damaged file.
    """
    for name, content in SAMPLES.items():
        truth, chance = decode_rgb(content), random.Random(f"{name} {seed}")
        for number in range(count):
            spoiled = damage.damaged(content, chance)
            # the last line tells what has killed it
            print(f"{name}, damage {number} of seed {seed}", flush=True)
            try:
                image, reason = decode_rgb(spoiled), "none"
            except BrokenImageError as error:
                image, reason = truth, str(error)
            assert reason
            assert "\n" not in reason
            assert (image.dtype, image.shape[0]) == (torch.uint8, 3)
            assert "png" not in name or torch.equal(image, truth), name


def in_a_process(folder, script):
    """A script that may kill its process: (exit code, stdout, stderr)."""
    path = [str(Path(__file__).parent), str(Path(damage.__file__).parent)]
    text = f"import sys\nsys.path[:0] = {path}\nimport test_decoding as here\n{script}\n"
    (folder / "script.py").write_text(text)
    return command(folder, script=folder / "script.py")


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_no_damage_ends_the_process(tmp_path, seed):
    code, out, err = in_a_process(tmp_path, f"here.decode_damaged({seed}, 100)")
    assert code == 0, f"{out.splitlines()[-1]}\n{err[-2000:]}"
    assert len(out.splitlines()) == 100 * len(SAMPLES)


@pytest.mark.slow
def test_large_and_transparent_images_are_read_without_a_word(tmp_path):
    # more than the 89 million pixels that Pillow warns of, and a palette with many shades of
    # transparency
    large = "here.decode_rgb(here.encoded(here.Image.new('L', (10_000, 9_000)), 'PNG'))"
    palette = "here.decode_rgb(here.damage.png(3, 8, transparent=True))"
    assert in_a_process(tmp_path, f"print(*{large}.shape, *{palette}.shape)") == (
        0,
        "3 9000 10000 3 23 37\n",
        "",
    )


def sized(name, marker, offset, layout, *size):
    """A sound file with another size in its header."""
    spoiled, place = bytearray(SAMPLES[name]), SAMPLES[name].index(marker) + offset
    spoiled[place : place + struct.calcsize(layout)] = struct.pack(layout, *size)
    return bytes(spoiled)


def test_a_header_that_claims_gigabytes_is_damage(monkeypatch):
    # where memory is taken the process may be killed: nothing may be decoded at all
    for decoder in ("decode_jpeg", "pil_to_tensor"):
        monkeypatch.setattr(f"torch_thor.training.data.decoding.{decoder}", None)
    for bomb in (
        damage.png(2, 8, stated=(30_000, 30_000)),
        damage.png(2, 8, stated=(2**31 - 1, 2**31 - 1)),
        sized("jpeg", b"\xff\xc0", 5, ">HH", 65_500, 65_500),
        sized("progressive jpeg", b"\xff\xc2", 5, ">HH", 65_500, 65_500),
        sized("gif", b"GIF8", 6, "<HH", 65_535, 65_535),
        sized("bmp", b"BM", 18, "<ii", 60_000, 60_000),
    ):
        with pytest.raises(
            BrokenImageError, match=r"Image size \(\d+ pixels\) exceeds limit of 178956970 pixels"
        ):
            decode_rgb(bomb)


def test_every_flipped_bit_of_a_png_is_noticed():
    content, chance = SAMPLES["photograph png"], random.Random(0)
    for _ in range(200):
        with pytest.raises(BrokenImageError):
            decode_rgb(damage.flipped(content, chance, count=1))


def test_a_png_may_hold_long_remarks():
    remarks = PngImagePlugin.PngInfo()
    remarks.add_itxt("XML:com.adobe.xmp", "x" * 3_000_000, zip=True)
    content = encoded(photograph(), "PNG", pnginfo=remarks)
    assert torch.equal(decode_rgb(content), decode_rgb(SAMPLES["photograph png"]))


def test_no_memory_is_no_fault_of_the_image(monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr("torch_thor.training.data.decoding.pil_to_tensor", fail)
    with pytest.raises(MemoryError):
        decode_rgb(SAMPLES["photograph png"])
