"""The cache gives the pixels that decoding gives, notices every change of a file, and is whole or not there."""

import os
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from torch_thor.training import UserError
from torch_thor.training.data import (
    BrokenImageError,
    DataSpec,
    EvaluationTransform,
    FolderSource,
    ImageSet,
    ImageTransform,
    Shard,
    Workers,
    cache,
    list_images,
)
from torch_thor.training.data.cache import open_cache

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")
CROP = EvaluationTransform(ImageTransform(size=24, resize=28))


def opened(folder, root, crop=CROP, workers=0):
    """A cache of the training images: they hold broken ones. Second result: whether it was made anew."""
    said = []
    source = open_cache(folder, list_images(root / "train"), crop, Workers(count=workers), said.append)
    return source, bool(said)


def folders(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


@pytest.mark.parametrize("workers", [0, 2])
def test_cached_pixels_are_decoded_pixels(imagenet, tmp_path, workers):
    source, made = opened(tmp_path / "cache", imagenet, workers=workers)
    assert made
    plain = list_images(imagenet / "train")
    refused = [index for index in range(18) if plain.where(index).endswith(("china_2.JPEG", "flower_2.JPEG"))]
    for index in range(18):
        assert source.where(index) == plain.where(index)
        if index in refused:
            reasons = []
            for one in (plain, source):
                with pytest.raises(BrokenImageError) as caught:
                    one.load(index)
                reasons.append(str(caught.value))
            assert reasons[0] == reasons[1]
        else:
            assert torch.equal(source.load(index), CROP(plain.load(index), 0, 0))
    assert len(refused) == len(source.broken) == 2
    assert torch.equal(source.labels, plain.labels)
    assert source.classes == plain.classes


def test_more_images_than_one_batch(imagenet, tmp_path, monkeypatch):
    whole, _ = opened(tmp_path / "one", imagenet)
    monkeypatch.setattr(cache, "BATCH", 5)
    parts, _ = opened(tmp_path / "other", imagenet)
    assert torch.equal(whole.images, parts.images)
    assert whole.broken == parts.broken


def test_a_second_opening_decodes_nothing(imagenet, tmp_path, monkeypatch):
    first, _ = opened(tmp_path, imagenet)
    monkeypatch.setattr(FolderSource, "load", lambda *_: pytest.fail("decoded again"))
    second, made = opened(tmp_path, imagenet)
    assert not made
    assert torch.equal(first.images, second.images)


@pytest.mark.parametrize("change", ["content", "time", "added", "removed", "renamed"])
def test_a_changed_file_makes_it_anew_and_removes_the_stale_one(tree, tmp_path, change):
    folder = tmp_path / "cache"
    _, _ = opened(folder, tree)
    before = folders(folder)
    path = tree / "train/china/china_0.JPEG"
    if change == "content":
        state = path.stat()
        shutil.copyfile(tree / "train/china/china_3.JPEG", path)
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))  # the size tells
    elif change == "time":
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    elif change == "added":
        shutil.copy2(path, path.with_name("new.JPEG"))
    elif change == "removed":
        path.unlink()
    else:
        path.rename(path.with_name("china_0b.JPEG"))
    source, made = opened(folder, tree)
    assert made
    assert len(folders(folder)) == 1
    assert folders(folder) != before
    plain = list_images(tree / "train")
    assert torch.equal(source.load(0), CROP(plain.load(0), 0, 0))


def test_other_crops_and_other_folders_have_caches_of_their_own(tree, tmp_path):
    folder = tmp_path / "cache"
    opened(folder, tree)
    opened(folder, tree, EvaluationTransform(ImageTransform(size=20, resize=28)))
    opened(folder, tree, EvaluationTransform(ImageTransform(size=24, resize=30)))
    shutil.copytree(tree, tmp_path / "copy")
    opened(folder, tmp_path / "copy")
    assert len(folders(folder)) == 4
    assert not opened(folder, tree)[1]


def test_a_killed_writer_leaves_nothing_that_is_taken_for_a_cache(tree, tmp_path, monkeypatch):
    folder = tmp_path / "cache"

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            opened(folder, tree)
    assert [name.startswith(".writing-") for name in folders(folder)] == [True]
    source, made = opened(folder, tree)
    assert made
    assert len(folders(folder)) == 1
    assert torch.equal(source.load(0), CROP(list_images(tree / "train").load(0), 0, 0))


DAMAGE = {
    "first byte": lambda content: bytes([content[0] ^ 1]) + content[1:],
    "middle byte": lambda c: c[: len(c) // 2] + bytes([c[len(c) // 2] ^ 1]) + c[len(c) // 2 + 1 :],
    "cut short": lambda content: content[:10],
    "longer": lambda content: content + b"0",
    "empty": lambda content: b"",
    "missing": None,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", [cache.IMAGES, cache.INDEX])
def test_a_damaged_cache_is_named_and_made_anew(imagenet, tmp_path, name, damage):
    whole, _ = opened(tmp_path, imagenet)
    pixels = whole.images.clone()
    path = tmp_path / folders(tmp_path)[0] / name
    content = path.read_bytes()
    path.unlink()  # what is mapped stays as it is
    if DAMAGE[damage] is not None:
        path.write_bytes(DAMAGE[damage](content))
    said = []
    source = open_cache(tmp_path, list_images(imagenet / "train"), CROP, Workers(count=0), said.append)
    assert torch.equal(source.images, pixels)
    assert source.broken == whole.broken
    assert f"the cache {path.parent} is damaged (" in said[0]
    assert name in said[0]
    assert len(said) == 2


@pytest.mark.skipif(os.name != "posix", reason="needs file modes")
def test_others_may_read_it_if_the_user_lets_them(imagenet, tmp_path):
    before = os.umask(0o022)
    try:
        source, _ = opened(tmp_path, imagenet)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in source.folder.iterdir()} == {0o644}


def test_a_place_that_cannot_hold_it_is_one_line(imagenet, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/cache cannot be written \(Not a directory\): choose another data.cache"):
        opened(tmp_path / "file" / "cache", imagenet)


def test_processes_that_come_together_make_it_once(imagenet, tmp_path):
    with ThreadPoolExecutor(4) as pool:  # the lock is on an open file, so threads stand for processes
        made = [made for _, made in pool.map(lambda _: opened(tmp_path, imagenet), range(4))]
    assert sorted(made) == [False, False, False, True]


def test_a_full_disk_is_said_before_anything_is_written(imagenet, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"18 decoded images needs 0.0 GB, .* free: choose another data.cache"):
        opened(tmp_path, imagenet)
    assert folders(tmp_path) == []


def test_a_worker_that_is_started_anew_maps_the_file_itself(imagenet, tmp_path):
    source, _ = opened(tmp_path, imagenet, EvaluationTransform(ImageTransform(size=224)))
    sent = pickle.dumps(source)
    assert len(sent) < 10_000
    assert torch.equal(pickle.loads(sent).load(0), source.load(0))


def test_evaluation_through_the_cache_is_evaluation(tree, tmp_path):
    (tree / "val/digit/digit_7.JPEG").write_bytes(b"")

    def batches(cache, workers=0):
        said = []
        transform = ImageTransform(size=24, resize=28)
        processes = Workers(count=workers)
        spec = DataSpec("image-folder", str(tree), False, transform, processes, max_broken=0.5, cache=cache)
        streams = ImageSet(spec, torch.device("cpu"), said.append).open(batch_size=4, seed=0, shard=Shard())
        result = list(streams.evaluation)
        assert any("digit_7.JPEG cannot be read (the file is empty)" in line for line in said)
        return result

    plain = batches(None)
    for workers in (0, 2):
        cached = batches(str(tmp_path / "cache"), workers)
        assert len(cached) == len(plain) == 3
        for (images, labels), (other_images, other_labels) in zip(plain, cached, strict=True):
            assert torch.equal(images, other_images)
            assert torch.equal(labels, other_labels)
