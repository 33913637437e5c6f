"""A small ImageNet: JPEGs of different sizes, with the odd files that the real ImageNet has."""

import functools

from PIL import Image
from sklearn.datasets import load_digits, load_sample_images

CLASSES = ("china", "digit", "flower")


@functools.cache
def pictures():
    """(class, number, picture) each."""
    china, flower = (Image.fromarray(image) for image in load_sample_images().images)
    images = (load_digits().images[:9] * 15).astype("uint8")
    digits = [Image.fromarray(image).convert("RGB") for image in images]
    found = []
    for number in range(9):
        x, y = 20 * number, 10 * number
        box = (x, y, x + 120 + 7 * number, y + 150 - 9 * number)
        found.append(("china", number, china.crop(box)))
        found.append(("flower", number, flower.crop(box)))
        found.append(("digit", number, digits[number].resize((64, 48), Image.Resampling.BICUBIC)))
    return found


def write_tree(root, train="train", evaluation="val"):
    """16 training images that can be read and 2 that cannot, 9 evaluation images."""
    for name, number, picture in pictures():
        folder = root / (train if number < 6 else evaluation) / name
        folder.mkdir(parents=True, exist_ok=True)
        picture.save(folder / f"{name}_{number}.JPEG", quality=90)
    odd = root / train
    names = ("china/china_1", "flower/flower_1", "digit/digit_1")
    grey, cmyk, rgba = (odd / f"{name}.JPEG" for name in names)
    Image.open(grey).convert("L").save(grey)
    Image.open(cmyk).convert("CMYK").save(cmyk)
    Image.open(rgba).convert("RGBA").save(rgba.with_suffix(".png"))
    rgba.unlink()
    (odd / "china/china_2.JPEG").write_bytes(b"this is no image" * 20)
    cut = odd / "flower/flower_2.JPEG"
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    return root
