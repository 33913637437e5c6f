"""Throughput of reading, decoding and cropping images on one core, and the number of cores that one GPU needs.

    python benchmarks/decode.py                                    # photographs of scikit-learn, cut to ImageNet's size
    python benchmarks/decode.py --folder /data/imagenet            # your own image files
    python benchmarks/decode.py --workers 0 4 8 16 --gpu-rate 2800 # with the measured images per second of a GPU

Each stage is timed in one process with one thread. The stages take turns in each round, so a change in the speed of
the machine affects all of them alike. The result is the median over the rounds in processor seconds, which other
programs do not affect. Waiting for a disk is not included, because the files are in memory after the first round. Then
the loader is timed in wall-clock time with each number of workers; other programs do affect this time.
Number of cores = images per second of the GPU / images per second and core of `read, decode, training crop`.
"""

import argparse
import itertools
import math
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image

from torch_thor.bench import describe, take_turns, write_json
from torch_thor.training.data.batches import loaded, training_keys
from torch_thor.training.data.decoding import decode_rgb, read_image
from torch_thor.training.data.images import Images, collate, open_images
from torch_thor.training.parallel import Ranks
from torch_thor.training.recipe import Data

RESULTS = Path(__file__).parent / "results"
WIDTH, HEIGHT, QUALITY = 500, 375, 97  # ImageNet's most frequent size, and near its mean of 110 kB a file
TRAINING = "read, decode, training crop"


def write_photographs(folder: Path, count: int) -> None:
    """Cut JPEGs of ImageNet's size out of scikit-learn's two photographs, half of them for each of two classes."""
    from sklearn.datasets import load_sample_images  # only without --folder

    for name, pixels in zip(("china", "flower"), load_sample_images().images, strict=True):
        (folder / "train" / name).mkdir(parents=True)
        picture = Image.fromarray(pixels)
        for number in range(count // 2):
            left, top = 3 * number % (picture.width - WIDTH), number % (picture.height - HEIGHT)
            cut = picture.crop((left, top, left + WIDTH, top + HEIGHT))
            cut.save(folder / "train" / name / f"{number}.JPEG", quality=QUALITY)
    (folder / "val").symlink_to(folder / "train")


def time_stages(train: Images, evaluation: Images, count: int, rounds: int) -> dict[str, float]:
    """Time each stage on one core, with so many training images; return the median of images a second."""
    chosen = list(range(0, len(train), max(1, len(train) // count)))[:count]
    contents = [read_image(train.source.where(index)) for index in chosen]
    stages: dict[str, Callable[[int, int], object]] = {  # of the place among the chosen, and of the index
        "read": lambda _, index: read_image(train.source.where(index)),
        "decode": lambda place, _: decode_rgb(contents[place]),
        TRAINING: lambda _, index: train[0, index],
        "read, decode, evaluation crop": lambda _, index: evaluation.crop(train.source[index]),
    }

    def over_all(stage: Callable[[int, int], object]) -> Callable[[], None]:
        def step() -> None:
            for place, index in enumerate(chosen):
                stage(place, index)

        return step

    steps = {name: over_all(stage) for name, stage in stages.items()}
    seconds = take_turns(steps, rounds, clock=time.process_time)  # in the warm-up files come into memory
    return {name: statistics.median(len(chosen) / took for took in times) for name, times in seconds.items()}


def time_loader(train: Images, workers: int, batch_size: int, batches: int) -> float:
    """Time the loader that trainings use, with so many workers, which have started; return images a second."""
    warm_up = max(1, 3 * workers)  # what is prefetched while nobody waits must not be counted
    keys = itertools.islice(training_keys(len(train), batch_size, 0, Ranks(), 0), warm_up + batches)
    loader = loaded(train, keys, workers=workers, prefetch=2, device=torch.device("cpu"), collate=collate)
    started, images = 0.0, 0
    for number, (_, labels) in enumerate(loader):
        if number >= warm_up:
            images += len(labels)
        if number == warm_up - 1:
            started = time.perf_counter()
        finished = time.perf_counter()
    return images / (finished - started)


def main() -> None:
    """Time everything, print a table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a folder that contains train/ and val/, as for training")
    parser.add_argument("--images", type=int, default=200, help="images a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--gpu-rate", type=float, nargs="+", default=[1000.0, 2000.0, 3000.0], help="images a second")
    parser.add_argument("--out", type=Path, default=RESULTS / "decode.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # torchvision points to its successor at every image
    warnings.filterwarnings("ignore", message="The image decoding", category=DeprecationWarning)
    with tempfile.TemporaryDirectory() as temporary:
        if options.folder is None:
            write_photographs(Path(temporary), options.images)
        data = Data(name="image-folder", root=str(options.folder or temporary))
        train, evaluation = open_images(data, 0)
        assert train is not None
        sizes = [train.source.where(index).stat().st_size for index in range(min(options.images, len(train)))]
        rates = time_stages(train, evaluation, options.images, options.rounds)
        loaders = {count: time_loader(train, count, options.batch, options.batches) for count in options.workers}
    cores = {f"{rate:g}": math.ceil(rate / rates[TRAINING]) for rate in options.gpu_rate}

    print(f"{os.cpu_count()} cores, {statistics.mean(sizes) / 1000:.0f} kB a file")
    for name, rate in rates.items():
        print(f"  {name:<30} {rate:8.0f} images a second a core")
    for count, rate in loaders.items():
        print(f"  loader, {count:>2} workers             {rate:8.0f} images a second")
    for rate, count in cores.items():
        print(f"  a GPU of {rate:>5} images a second is fed by {count} cores")
    result = {
        "machine": describe(),
        "settings": {key: value for key, value in vars(options).items() if key not in {"folder", "out"}},
        "files": "own folder" if options.folder else "photographs of scikit-learn",
        "mean_bytes": statistics.mean(sizes),
        "images_a_second_a_core": rates,
        "images_a_second_of_the_loader": loaders,
        "cores_for_a_gpu_of": cores,
    }
    write_json(options.out, result, indent=1)


if __name__ == "__main__":
    main()
