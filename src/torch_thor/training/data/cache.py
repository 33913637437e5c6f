"""A cache of decoded and cropped evaluation images, as one memory-mapped file of uint8.

The crops of an evaluation never change, so decoding them in each evaluation repeats the same work. The cache is a
folder

    <set>-<key>/images.u8    (N, size, size, 3), uint8
    <set>-<key>/index.json   the source, the images that could not be read, and checksums

where the key is a digest of the crop and of the path, size and modification time of every file. The folder is written
under another name, flushed, and renamed. If a file changes, so does the key, and the outdated folder is removed.
Opening the cache reads it once to verify the checksums. This takes some seconds for the 7.5 GB of ImageNet, which the
evaluation is about to read anyway.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor

from torch_thor.files import remove_remains, whole_folder
from torch_thor.training.checksums import add_checksum, checksum_matches, sha256
from torch_thor.training.config.data_spec import Workers
from torch_thor.training.data.decoding import BrokenImageError
from torch_thor.training.data.folder import FolderSource
from torch_thor.training.data.reading import raw_loader
from torch_thor.training.data.transforms import EvaluationTransform
from torch_thor.training.errors import UserError
from torch_thor.training.output_files import writing

FORMAT = 2  # part of the key, so that caches of format 1, which have no checksums, are replaced
IMAGES, INDEX = "images.u8", "index.json"
BATCH = 64
ANOTHER = "choose another data.cache, or null for none"


class CachedSource:
    """Evaluation images that are already cropped.

    Args:
        source: The image files.
        folder: The folder of the cache.
        size: Height and width of an image, in pixels.
        broken: The reason for each image that could not be read, by its index.
    """

    def __init__(self, source: FolderSource, folder: Path, size: int, broken: dict[int, str]) -> None:
        self.source, self.folder, self.size, self.broken = source, folder, size, broken
        self.labels, self.classes = source.labels, source.classes
        count = len(source.labels)
        path = str(folder / IMAGES)
        flat = torch.from_file(path, shared=False, size=count * size * size * 3, dtype=torch.uint8)
        self.images = flat.view(count, size, size, 3).permute(0, 3, 1, 2)

    def load(self, index: int) -> Tensor:
        """Read one image.

        Args:
            index: In [0, N).

        Returns:
            (3, size, size), uint8.

        Raises:
            BrokenImageError: If the image could not be read when the cache was made.
        """
        if index in self.broken:
            raise BrokenImageError(self.broken[index])
        return self.images[index]

    def where(self, index: int) -> str:
        """Return the path of the file that an image was made from.

        Args:
            index: In [0, N).

        Returns:
            The full path.
        """
        return self.source.where(index)

    def __getstate__(self) -> dict[str, object]:
        return {"source": self.source, "folder": self.folder, "size": self.size, "broken": self.broken}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # a worker maps the file itself, so that gigabytes need not be sent


@dataclass
class Uncropped:
    """The transform of cached images, which are cropped already: the identity.

    Args:
        size: Height and width of an image, in pixels.
    """

    size: int

    def __call__(self, image: Tensor, epoch: int, index: int) -> Tensor:
        """Return the image unchanged.

        Args:
            image: (3, size, size), uint8.
            epoch: Not used.
            index: Not used.

        Returns:
            The image.
        """
        return image


def open_cache(
    folder: Path, source: FolderSource, crop: EvaluationTransform, workers: Workers, say: Callable[[str], None]
) -> CachedSource:
    """Open the cache of an evaluation set. If it is missing or outdated, it is built first.

    Of several processes on a machine, one builds the cache while the others wait.

    Args:
        folder: The folder of the caches; it is created if it is missing.
        source: The evaluation images.
        crop: The transform of each image.
        workers: The processes that decode.
        say: Prints a line; it is called if a cache is built, and if the existing one is damaged.

    Returns:
        The same images, cropped.

    Raises:
        UserError: If the cache cannot be written or does not fit on the disk.
    """
    what = _digest(str(source.root.resolve()), str(crop.size), str(crop.resize))
    final = folder / f"{what}-{_key(source, crop)}"
    size = len(source.labels) * crop.size * crop.size * 3
    with suppress(_UnusableError):  # without the lock, so that all processes of a machine can verify at the same time
        return CachedSource(source, final, crop.size, _read(final, size))
    with writing(folder, ANOTHER):
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{what}.lock"):  # released also if its process dies
            try:
                broken = _read(final, size)
            except _UnusableError as error:
                if error.said:
                    say(f"the cache {final} is damaged ({error.said}): it is built again")
                remove_remains(folder, f"{what}-*")
                for stale in folder.glob(f"{what}-*"):
                    shutil.rmtree(stale)
                broken = _make(final, source, crop, workers, say)
    return CachedSource(source, final, crop.size, broken)


class _UnusableError(Exception):
    """There is no usable cache. `said` is the damage, or empty if there is no cache at all."""

    def __init__(self, said: str = "") -> None:
        self.said = said


def _read(final: Path, size: int) -> dict[int, str]:
    # verify the cache; returns its broken images
    if not final.exists():
        raise _UnusableError
    try:
        index = json.loads((final / INDEX).read_text(encoding="utf-8"))
        if not (isinstance(index, dict) and checksum_matches(index)):
            raise _UnusableError(f"{INDEX} does not match its checksum")
        if (final / IMAGES).stat().st_size != size or sha256(final / IMAGES) != index["sha256"]:
            raise _UnusableError(f"{IMAGES} does not match its checksum")
    except OSError as error:
        raise _UnusableError(f"{error.strerror}: {error.filename}") from error
    except (ValueError, RecursionError) as error:
        raise _UnusableError(f"{INDEX} is not JSON") from error
    return {int(number): str(reason) for number, reason in index["broken"].items()}


def _make(
    final: Path, source: FolderSource, crop: EvaluationTransform, workers: Workers, say: Callable[[str], None]
) -> dict[int, str]:
    count, pixels = len(source.labels), crop.size * crop.size * 3
    free = shutil.disk_usage(final.parent).free
    if free < count * pixels:
        raise UserError(
            f"the cache of {count} decoded images needs {count * pixels / 1e9:.1f} GB, but {final.parent} has only "
            f"{free / 1e9:.1f} GB free: {ANOTHER}"
        )
    say(f"{source.root}: decoding {count} images into {final} ({count * pixels / 1e9:.1f} GB), once")
    with whole_folder(final) as temporary:
        broken = _decode(temporary / IMAGES, source, crop, workers)
        index = {
            "format": FORMAT,
            "root": str(source.root),
            "size": crop.size,
            "resize": crop.resize,
            "broken": {str(number): reason for number, reason in broken.items()},
            "sha256": sha256(temporary / IMAGES),
        }
        (temporary / INDEX).write_text(json.dumps(add_checksum(index), indent=1) + "\n", encoding="utf-8")
    return broken


def _decode(file: Path, source: FolderSource, crop: EvaluationTransform, workers: Workers) -> dict[int, str]:
    # write the pixels of all images; returns the reason for each broken one
    count, pixels = len(source.labels), crop.size * crop.size * 3
    with file.open("wb") as empty:  # a file that torch creates is readable for its owner only
        empty.truncate(count * pixels)
        if hasattr(os, "posix_fallocate"):  # a full disk would otherwise kill the process that writes to the mapping
            os.posix_fallocate(empty.fileno(), 0, count * pixels)
    images = torch.from_file(str(file), shared=True, size=count * pixels, dtype=torch.uint8)
    rows = images.view(count, crop.size, crop.size, 3)
    broken: dict[int, str] = {}
    parts = [range(first, min(first + BATCH, count)) for first in range(0, count, BATCH)]
    keys = [[(0, index) for index in part] for part in parts]
    for part, batch in zip(parts, raw_loader(source, crop, keys, workers), strict=True):
        broken.update(batch.broken)
        kept = [index for index in part if index not in broken]
        rows[kept] = batch.images.permute(0, 2, 3, 1)
    return broken


def _key(source: FolderSource, crop: EvaluationTransform) -> str:
    parts = [str(FORMAT), str(crop.size), str(crop.resize)]
    for index in range(len(source.labels)):
        try:
            state = Path(source.where(index)).stat()
            parts.append(f"{source.name(index)}\0{state.st_size}\0{state.st_mtime_ns}")
        except OSError:  # it will be reported as a broken image
            parts.append(source.name(index))
    return _digest(*parts)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:16]
