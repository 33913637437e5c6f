"""Batches: the same for any number of workers and after any resume; broken images are named, counted and left out."""

import itertools
import warnings

import pytest
import torch
from torchvision.transforms import v2

from tiny import assert_same
from torch_thor.training import UserError
from torch_thor.training.data import (
    BrokenImageError,
    DataSpec,
    ImageSet,
    ImageTransform,
    Shard,
    TrainingTransform,
    Workers,
    list_images,
)

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")
SMALL = ImageTransform(size=24, resize=28)
CPU = torch.device("cpu")


def opened(root, workers=0, batch_size=4, seed=1, shard=None, say=None, max_broken=0.5, **options):
    options = {"name": "image-folder", "transform": SMALL, **options}
    spec = DataSpec(root=str(root), workers=Workers(count=workers), max_broken=max_broken, **options)
    say = say if say is not None else lambda _: None
    return ImageSet(spec, CPU, say).open(batch_size=batch_size, seed=seed, shard=shard or Shard())


@pytest.fixture(scope="module")
def three_epochs(imagenet):
    with warnings.catch_warnings(action="ignore"):
        stream = opened(imagenet).train
        return [list(stream) for _ in range(3)]


def test_batches_are_what_the_files_hold(imagenet, three_epochs):
    source = list_images(imagenet / "train")
    crop = TrainingTransform(SMALL, seed=1)
    normalise = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(SMALL.mean, SMALL.std)])
    for epoch, batches in enumerate(three_epochs):
        stream = opened(imagenet).train
        for (images, labels), numbers in zip(batches, stream.order.epoch(epoch), strict=True):
            kept = []
            for index in numbers:
                try:
                    kept.append((normalise(crop(source.load(index), epoch, index)), source.labels[index]))
                except BrokenImageError:
                    continue
            torch.testing.assert_close(images, torch.stack([image for image, _ in kept]), rtol=0, atol=1e-5)
            assert labels.tolist() == [int(label) for _, label in kept]


def test_batches_are_channels_last_floats(three_epochs):
    for images, labels in three_epochs[0]:
        assert images.dtype == torch.float32
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert images.shape[1:] == (3, 24, 24)
        assert labels.dtype == torch.int64


def test_epochs_differ(three_epochs):
    assert not torch.equal(three_epochs[0][0][0], three_epochs[1][0][0])


@pytest.mark.parametrize("workers", [1, 2])
def test_the_number_of_workers_changes_nothing(imagenet, three_epochs, workers):
    stream = opened(imagenet, workers=workers).train
    for epoch in three_epochs:  # the workers persist from one to the next
        assert_same(list(stream), epoch)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("consumed", [0, 1, 3, 4, 6])
def test_a_resumed_stream_goes_on_bit_for_bit(imagenet, three_epochs, workers, consumed):
    whole = list(itertools.chain.from_iterable(three_epochs))
    stream = opened(imagenet, workers=workers).train
    for _ in itertools.islice(itertools.chain(stream, stream), consumed):
        pass
    state = stream.state_dict()
    assert (state["epoch"], state["batch"]) == divmod(consumed, 4)
    resumed = opened(imagenet, workers=2 - workers).train
    resumed.load_state_dict(state)
    rest = [batch for _ in range(3 - consumed // 4) for batch in resumed]
    assert_same(rest, whole[consumed:])
    assert (resumed.epoch, resumed.batch) == (3, 0)


def test_an_iteration_that_was_left_goes_on(imagenet, three_epochs):
    stream = opened(imagenet, workers=2).train
    first = next(iter(stream))  # the workers have read ahead by now
    assert_same([first, *stream], three_epochs[0])


def test_the_state_is_plain_values(imagenet):
    stream = opened(imagenet).train
    next(iter(stream))

    def plain(value):
        if isinstance(value, dict):
            return all(isinstance(key, str) and plain(item) for key, item in value.items())
        return all(map(plain, value)) if isinstance(value, list) else type(value) is int

    assert plain(stream.state_dict())


def test_a_state_of_other_data_is_refused(imagenet):
    state = opened(imagenet).train.state_dict()
    for key, other in [
        ("seed", opened(imagenet, seed=2)),
        ("batch_size", opened(imagenet, batch_size=5)),
    ]:
        with pytest.raises(UserError, match=f"the checkpoint's data has {key}="):
            other.train.load_state_dict(state)
    with pytest.raises(UserError, match="samples=17, this run samples=18"):
        opened(imagenet).train.load_state_dict(state | {"samples": 17})


def test_other_ranks_go_on_with_the_same_batches(imagenet):
    stream = opened(imagenet, batch_size=6).train
    whole = [labels.tolist() for _, labels in [*stream, *stream]]
    stream = opened(imagenet, batch_size=6).train
    next(iter(stream))
    ranks = [opened(imagenet, batch_size=6, shard=Shard(rank, 2)).train for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(stream.state_dict())
    steps = zip(*(itertools.chain(rank, rank) for rank in ranks), strict=True)
    assert [torch.cat([labels for _, labels in step]).tolist() for step in steps] == whole[1:]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_evaluate_every_image_once_and_in_every_evaluation(imagenet, world):
    for _ in range(2):
        loaders = [opened(imagenet, shard=Shard(rank, world), batch_size=2 * world).evaluation for rank in range(world)]
        batches = [batch for loader in loaders for batch in loader]
        rows = {tuple(image.flatten()[:200].tolist()) for images, _ in batches for image in images}
        assert sum(len(labels) for _, labels in batches) == len(rows) == 9
        assert sorted(int(label) for _, labels in batches for label in labels) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_evaluation_starts_anew_after_a_stop(imagenet):
    loader = opened(imagenet, workers=1, batch_size=3).evaluation
    whole = list(loader)
    next(iter(loader))
    assert_same(list(loader), whole)


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_images_are_named_once_and_left_out(imagenet, workers):
    said = []
    data = opened(imagenet, workers=workers, batch_size=6, say=said.append)
    sizes = [[len(labels) for _, labels in data.train] for _ in range(3)]
    assert [sum(epoch) for epoch in sizes] == [16, 16, 16]
    assert data.train.loader.broken.count == 2
    assert sorted(line.split(" ")[0].rpartition("/")[2] for line in said) == ["china_2.JPEG", "flower_2.JPEG"]
    assert all(line.startswith(str(imagenet)) and line.endswith("is left out") for line in said)
    assert any("truncated" in line for line in said)


def test_a_resumed_run_names_no_image_twice(imagenet):
    said = []
    stream = opened(imagenet, say=said.append).train
    list(stream)
    resumed = opened(imagenet, say=said.append).train
    resumed.load_state_dict(stream.state_dict())
    list(resumed)
    assert len(said) == 2


def test_too_many_broken_images_are_an_error(imagenet):
    # 2 of 18: 11.1 %
    assert len(list(opened(imagenet, batch_size=6, max_broken=0.112).train)) == 3
    with pytest.raises(UserError, match=r"2 of an epoch's 18 images .* data\.max_broken=0.11 .*_2.JPEG") as caught:
        list(opened(imagenet, batch_size=6, max_broken=0.11).train)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="1 of an epoch's 18 images"):
        list(opened(imagenet, batch_size=6, max_broken=0.0).train)


def test_each_epoch_counts_its_own(imagenet):
    stream = opened(imagenet, batch_size=7).train  # 14 of 18 images, so that some epochs leave a broken one out
    names = [stream.loader.source.where(index) for index in range(18)]
    bad = {index for index, name in enumerate(names) if name.endswith(("china_2.JPEG", "flower_2.JPEG"))}
    counts = set()
    for epoch in range(8):
        list(stream)
        due = bad & {index for batch in stream.order.epoch(epoch) for index in batch}
        assert stream.loader.broken.in_epoch == due
        counts.add(len(due))
    assert len(counts) > 1


def test_a_training_batch_without_any_image_is_an_error(imagenet):
    with pytest.raises(UserError, match=r"no image of a batch can be read; the last one is .*_2.JPEG"):
        list(opened(imagenet, batch_size=1).train)


def test_bad_options(imagenet):
    with pytest.raises(UserError, match=r"data\.workers\.count=-1"):
        Workers(count=-1)
    with pytest.raises(UserError, match=r"data\.workers\.prefetch=0"):
        Workers(prefetch=0)
    with pytest.raises(UserError, match=r"data.name=mnist .* cifar10, cifar100, image-folder"):
        DataSpec(name="mnist")
    with pytest.raises(UserError, match=r"data\.root is not set: .* give it as data.root=FOLDER"):
        ImageSet(DataSpec(name="image-folder"), CPU, print)
    with pytest.raises(UserError, match="cifar10 is in memory already"):
        DataSpec(name="cifar10", cache=str(imagenet))
    with pytest.raises(UserError, match=r"digits is used without crops: leave data.transform=null"):
        DataSpec(name="digits", transform=SMALL)
    with pytest.raises(UserError, match=r"data.max_broken=1 must be a fraction in \[0, 1\)"):
        DataSpec(max_broken=1)
