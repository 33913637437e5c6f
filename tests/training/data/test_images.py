"""Folders of images and CIFAR: what is listed, read and cropped; each way in which they can be
wrong is one line.
"""

import errno
import functools
import hashlib
import itertools
import math
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torchvision.datasets import CIFAR10, CIFAR100, ImageFolder
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import resize

from image_tree import CLASSES, write_tree
from torch_thor.errors import UserError
from torch_thor.training.data.batches import digest
from torch_thor.training.data.images import collate, normalised, open_images
from torch_thor.training.recipe_model import CIFAR, Data, Transform

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")
SMALL = Transform(size=24, resize=28)


def opened(root, train=True, say=print, **options):
    return open_images(
        Data(name="image-folder", root=str(root), **options), 5, train=train, say=say
    )


def paths_of(images, root):
    return [str(images.source.where(index).relative_to(root)) for index in range(len(images))]


def raising(error):
    def fail(*_, **__):
        raise error

    return fail


def refused(root, match, **options):
    with pytest.raises(UserError, match=match) as caught:
        opened(root, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("names", [("train", "val"), ("train", "test"), ("ilsvrc", "ilsvrc_eval")])
def test_the_list_is_that_of_torchvision(tmp_path, names):
    write_tree(tmp_path, *names)
    place = tmp_path / names[0] / "digit/Blüten/日本"
    place.mkdir(parents=True)
    shutil.copy(tmp_path / names[0] / "flower/flower_3.JPEG", place / "ö.jpg")
    (tmp_path / names[0] / "digit/notes.txt").write_text("no image")
    for found, name, count in zip(opened(tmp_path), names, (19, 9), strict=True):
        truth = ImageFolder(str(tmp_path / name))
        assert found.classes == truth.classes == list(CLASSES)
        assert [
            (str(found.source.where(index)), int(found.labels[index]))
            for index in range(len(found))
        ] == truth.samples
        assert len(truth.samples) == count


def test_an_evaluation_needs_no_training_images(tree):
    shutil.rmtree(tree / "train/digit")
    refused(tree, "only one of train and val has the class folders digit: ", train=False)
    shutil.rmtree(tree / "train")
    training, held_out = opened(tree, train=False)
    assert training is None
    assert len(held_out) == 9
    refused(
        tree,
        "must contain train and val or train and test or ilsvrc and ilsvrc_eval, each with a "
        "folder for each class",
    )


def test_folders_that_are_wrong(tree):
    for index, (spoil, match) in enumerate([
        ("rm -r val", "data.root=.* must contain train and val or train and test or ilsvrc and "),
        ("rm val/*/*.JPEG",
        "val: no image in china, digit, flower: add images .*, or remove the class"),
        ("rm -r train/*/",
        "only one of train and val has the class folders china, digit, flower: "),
        ("rm -r */digit */flower",
        "must contain a folder for each of two or more classes: sort the images"),
        ("rm train/digit/*; touch train/digit/a.txt", "train: no image in digit: add images"),
        ("mv val/digit val/digits",
        "has the class folders digit, digits: .* both must have the same classes"),
        ("mkdir val/x0 val/x1 val/x2 val/x3", "the class folders x0, x1, x2 and 1 more: "),
        ("ln -s . train/zebra; ln -s . val/zebra",
        "train/zebra is a link to a folder that contains it, .*: remove"),
        ("ln -s .. train/digit/one; ln -s .. train/digit/two",
        "is a link to a folder that contains it"),
        ("ln -s / train/digit/more", "train/digit/more is a link to a folder that contains it"),
        ("ln -s /nowhere/x train/x; ln -s /nowhere/x val/x",
        "/x is a link to nothing, so its images would be missing: mount the disk .* or remove"),
        ("ln -s loop val/loop", "val/loop is a link to nothing"),
        ("ln -s /nowhere/more train/digit/more", "train/digit/more is a link to nothing"),
        ("mv val test; ln -s /nowhere/val val", "val is a link to nothing"),
    ]):  # fmt: skip
        root = tree.parent / str(index)
        shutil.copytree(tree, root)
        assert os.system(f"cd {root} && {spoil}") == 0
        refused(root, match)
    refused(tree / "nowhere", "nowhere must contain train and val")
    with pytest.raises(UserError, match=r"data.root is not set: .* give it as data.root=FOLDER"):
        open_images(Data(name="image-folder"), 0)


def test_what_programs_leave_behind_is_no_class_and_no_image(tree):
    before = [paths_of(images, tree) for images in opened(tree)]
    picture = tree / "train/china/china_0.JPEG"
    for split in ("train", "val"):
        for place in (
            ".ipynb_checkpoints",
            "@eaDir",
            "__MACOSX",
            "china/.thumbnails",
            "digit/@eaDir",
        ):
            (tree / split / place).mkdir()
            shutil.copy(picture, tree / split / place / "a.jpg")
        (tree / split / "flower/._flower_0.JPEG").write_bytes(b"\0\5\x16\7" + bytes(4092))
        (tree / split / "flower/Thumbs.db").write_bytes(b"\xd0\xcf\x11\xe0")
        (tree / split / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    (tree / "val/.only").symlink_to("nowhere")
    said = []
    found = opened(tree, say=said.append)
    assert [images.classes for images in found] == [list(CLASSES)] * 2
    assert [paths_of(images, tree) for images in found] == before
    start = "left out of its files and folders:"
    assert [line.partition(" (")[0] for line in said] == [
        f"{tree}/train: {start} 8 hidden or made by programs",
        f"{tree}/val: {start} 9 hidden or made by programs",
    ]
    assert "@eaDir 2" in said[0]
    # what the user names is taken
    hidden = tree.parent / ".cache"
    tree.rename(hidden)
    assert [paths_of(images, hidden) for images in opened(hidden)] == before


def test_images_are_told_by_content_and_other_files_are_counted(tree, monkeypatch):
    place, picture = tree / "val/digit", Image.open(tree / "val/digit/digit_6.JPEG")
    added = []
    for name, kind in [("none", "PNG"), ("x.dat", "TIFF"), ("notes.pdf", "JPEG"), ("a.h5", "GIF"),
    ("b.jp2", "JPEG2000"), ("c.avif", "AVIF"), ("d.tga", "TGA"), ("e.ppm", "PPM")]:  # fmt: skip
        picture.save(place / name, kind)
        added.append(f"val/digit/{name}")
    picture.save(place / "drawing.eps", "EPS")  # which would be executed
    (place / "README").write_text("P3 is how some portable pixmaps begin, and this is none")
    (place / "train.csv").write_text("name,label\n")
    (place / "scan.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    os.mkfifo(place / "pipe")
    (tree / "val/labels.txt").write_text("china 0")
    said = []
    _, held_out = opened(tree, train=False, say=said.append)
    assert {path for path in paths_of(held_out, tree) if "digit/digit" not in path} >= set(added)
    assert len(held_out) == 9 + len(added)
    (line,) = said
    assert line.startswith(f"{tree}/val: left out of its files and folders: 6 that are no images (")
    assert "without a suffix 2" in line
    assert "beside the class folders 1" in line
    for index in range(len(held_out)):
        assert not isinstance(held_out[0, index], str)
    # of a file with the suffix of an image the content is not looked at before it is read
    monkeypatch.setattr("torch_thor.training.data.images.is_image", lambda _: False)
    assert len(opened(tree, train=False)[1]) == 9 + 4


def test_a_file_without_a_suffix_that_cannot_be_opened_is_an_error(tree, monkeypatch):
    (tree / "val/digit/none").write_bytes((tree / "val/digit/digit_6.JPEG").read_bytes())
    denied = PermissionError(errno.EACCES, "Permission denied", str(tree / "val/digit/none"))
    monkeypatch.setattr(Path, "open", raising(denied))
    refused(tree, r"digit/none cannot be listed \(Permission denied\), .*: repair or remove it")


def test_class_names_that_look_the_same_are_told_apart(tree):
    for split, name in (("train", "caf\u00e9"), ("val", "cafe\u0301")):
        shutil.copytree(tree / split / "digit", tree / split / name)
    for split in ("train", "val"):
        shutil.copytree(tree / split / "digit", tree / split / "\u00e9l\u00e9phant")  # of both
    shutil.copytree(tree / "val/digit", tree / "val/\u00e0ne")
    said = (
        r"class folders cafe\u0301 \(Unicode form NFD\), caf\u00e9 \(Unicode form NFC\), \u00e0ne: "
    )
    refused(tree, said)


def test_links_that_lead_elsewhere_are_followed(tree, tmp_path):
    (tree / "val/china").rename(tmp_path / "elsewhere")
    (tree / "val/china").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "elsewhere/more").symlink_to(tree / "val/flower", target_is_directory=True)
    _, held_out = opened(tree)
    assert held_out.labels.tolist() == [0] * 6 + [1] * 3 + [2] * 3
    assert held_out.source.where(3) == tree / "val/china/more/flower_6.JPEG"


def test_a_folder_that_cannot_be_listed_is_an_error(tree, monkeypatch):
    # simulated: to the root user, as whom tests may run, every folder is readable
    (tree / "train/digit/more").mkdir()
    for place in ("train", "train/digit", "train/digit/more"):

        def closed(path, function, place=place):
            if Path(path) == tree / place:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return function(path)

        with monkeypatch.context() as patch:
            for name in ("scandir", "listdir"):
                patch.setattr(os, name, functools.partial(closed, function=getattr(os, name)))
            refused(
                tree, rf"{place} cannot be listed \(Permission denied\), .*: repair or remove it"
            )


def test_what_is_no_image_is_named_and_never_opened(tree, monkeypatch):
    monkeypatch.chdir(tree / "train/digit")
    os.mkfifo("pipe.bmp")
    with Path("disk.bmp").open("wb") as file:
        file.truncate(2**40)
    expected = {"disk": "1099.5 GB are too much for an image", "pipe": "it is not a regular file"}
    for name, target, reason in [
        ("zero", "/dev/zero", expected["pipe"]), ("link", "pipe.bmp", expected["pipe"]),
        ("circle", "circle.bmp", os.strerror(errno.ELOOP)),
        ("lost", "x", "No such file or directory"),
    ]:  # fmt: skip
        Path(f"{name}.bmp").symlink_to(target)
        expected[name] = reason
    training, _ = opened(tree)
    paths = {training.source.where(index): index for index in range(len(training))}
    monkeypatch.setattr("io.open", lambda *_, **__: pytest.fail("opened"))
    for name, reason in expected.items():
        path = tree / f"train/digit/{name}.bmp"
        assert training[0, paths[path]] == f"{path} cannot be read ({reason})"


def test_too_many_open_files_are_no_fault_of_the_image(tree, monkeypatch):
    monkeypatch.setattr(
        Path, "read_bytes", raising(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    )
    with pytest.raises(
        UserError, match=r"china_0.JPEG cannot be opened \(Too many open files\): .* \(ulimit -n\)"
    ):
        opened(tree)[0][0, 0]


def photograph():
    return torch.tensor(load_sample_images().images[1]).permute(2, 0, 1)  # 427 x 640


@pytest.fixture
def cropped(tree, monkeypatch):
    """Training and evaluation images of which all have the same pixels."""

    def images(options, image, seed=5):
        monkeypatch.setattr("torch_thor.training.data.images.decode_rgb", lambda _: image)
        return open_images(Data(name="image-folder", root=str(tree), transform=options), seed)

    return images


def test_training_crops_are_those_of_torchvision_under_the_seed_of_the_sample(cropped):
    pipeline = v2.Compose([v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip(0.5)])
    found = []
    for seed, epoch, index in itertools.product((5, 6), (0, 2), (0, 1)):
        torch.manual_seed(digest(seed, epoch, index))
        found.append(pipeline(photograph()))
        torch.rand(7)
        assert torch.equal(cropped(Transform(), photograph(), seed)[0][epoch, index][0], found[-1])
    assert not any(torch.equal(*pair) for pair in itertools.combinations(found, 2))


@pytest.mark.slow
def test_training_crops_have_the_stated_areas_ratios_and_flips(cropped):
    # the pixels of the image are its coordinates, so that a crop tells where it was taken
    height, width = 200, 250
    rows = torch.arange(height, dtype=torch.uint8).view(-1, 1).expand(height, width)
    columns = torch.arange(width, dtype=torch.uint8).view(1, -1).expand(height, width)
    images, _ = cropped(Transform(), torch.stack([rows, columns, rows]))
    crops = torch.stack([images[epoch, 0][0] for epoch in range(300)]).double()
    rise = (crops[:, 0, 200, 112] - crops[:, 0, 24, 112]) / 176 * 224
    run = (crops[:, 1, 112, 200] - crops[:, 1, 112, 24]) / 176 * 224
    areas, ratios = rise * run.abs() / (height * width), run.abs() / rise
    assert 0.07 < areas.min() < 0.15
    assert 0.85 < areas.max() < 1.05
    assert 0.72 < ratios.min() < 0.80
    assert 1.25 < ratios.max() < 1.40
    assert abs((run < 0).double().mean() - 0.5) < 4 * math.sqrt(0.25 / 300)


@pytest.mark.slow
def test_padded_crops(cropped):
    image = torch.randint(1, 256, (3, 32, 32), dtype=torch.uint8)
    images, _ = cropped(Transform(size=32, resize=32, padding=4, flip=0.0), image)
    padded = torch.nn.functional.pad(image, (4, 4, 4, 4))
    places = {(y, x): padded[:, y : y + 32, x : x + 32] for y in range(9) for x in range(9)}
    crops = [images[epoch, 0][0] for epoch in range(200)]
    found = [[key for key, value in places.items() if torch.equal(value, c)] for c in crops]
    assert all(len(keys) == 1 for keys in found)
    assert {y for ((y, _),) in found} == {x for ((_, x),) in found} == set(range(9))


def test_evaluation_crops_by_hand(cropped):
    _, images = cropped(Transform(), photograph())
    # 427 x 640: the shorter side becomes 256, the longer one int(640 * 256 / 427) = 383
    resized = resize(photograph(), [256, 383], antialias=True)
    assert torch.equal(images[0, 0][0], resized[:, 16:240, 80:304])
    assert cropped(Transform(), torch.zeros(3, 1, 100, dtype=torch.uint8))[1][0, 0][0].shape == (
        3,
        224,
        224,
    )
    _, images = cropped(Transform(), torch.zeros(3, 1, 101, dtype=torch.uint8))
    assert (
        images[0, 0] == f"{images.source.where(0)} cannot be read (101 × 1 pixels are too narrow)"
    )


def test_batches_are_normalised_and_channels_last():
    samples = [
        (torch.randint(0, 256, (3, 5, 4), dtype=torch.uint8), torch.tensor(label))
        for label in (4, 2)
    ]
    images, labels = collate(samples)
    assert labels.tolist() == [4, 2]
    result = normalised(images, SMALL)
    assert result.dtype == torch.float32
    assert result.is_contiguous(memory_format=torch.channels_last)
    mean, std = (
        torch.tensor(one, dtype=torch.float64).view(3, 1, 1) for one in (SMALL.mean, SMALL.std)
    )
    expected = torch.stack([(image.double() / 255 - mean) / std for image, _ in samples])
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=2e-6)


def dump(path, content):
    path.write_bytes(pickle.dumps(content))
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("kind", "classes", "key"),
    [(CIFAR10, 10, "labels"), (CIFAR100, 100, "fine_labels")],
    ids=["10", "100"],
)
def test_cifar_is_what_its_files_hold(tmp_path, monkeypatch, kind, classes, key):
    folder, parts, names = (
        tmp_path / kind.base_folder,
        [],
        [f"class {number}" for number in range(classes)],
    )
    folder.mkdir()
    # three images a file, of which torchvision checks the sum
    for attribute in ("train_list", "test_list"):
        listed, pixels, labels = [], [], []
        for number, (name, _) in enumerate(getattr(kind, attribute)):
            data = np.random.default_rng(number).integers(0, 256, (3, 3072), dtype=np.uint8)
            own = [0, classes - 1, (number + 3) % classes]
            listed.append(
                [name, dump(folder / name, {"data": data, key: own, "coarse_labels": [0, 0, 0]})]
            )
            pixels.append(data.reshape(-1, 3, 32, 32))
            labels += own
        monkeypatch.setattr(kind, attribute, listed)
        parts.append((torch.from_numpy(np.concatenate(pixels)), labels))
    checksum = dump(folder / kind.meta["filename"], {kind.meta["key"]: names})
    monkeypatch.setattr(kind, "meta", kind.meta | {"md5": checksum})
    data = Data(name=f"cifar{classes}", root=str(tmp_path), download=False)
    assert data.crops == CIFAR
    for found, (pixels, labels) in zip(open_images(data, 0), parts, strict=True):
        assert torch.equal(found.source, pixels)
        assert (found.labels.tolist(), found.classes) == (labels, names)
    # evaluated as they are
    assert all(torch.equal(found[0, index][0], image) for index, image in enumerate(pixels))
    path = folder / kind.train_list[0][0]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        UserError,
        match=rf"cifar{classes} is missing or incomplete in .*{kind.base_folder}.* data.down",
    ):
        open_images(data, 0)


def test_a_download_that_fails(tmp_path, monkeypatch):
    fail = raising(OSError("no route to host"))
    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", fail)
    with pytest.raises(UserError, match=r"no route to host.*check the network"):
        open_images(Data(name="cifar10", root=str(tmp_path)), 0)
