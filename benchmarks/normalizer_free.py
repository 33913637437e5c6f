"""Networks without normalisation: learning rates at which SGD diverges, and small batches compared with BatchNorm.

    python benchmarks/normalizer_free.py              # runs what is missing in results/normalizer_free, then the table
    python benchmarks/normalizer_free.py --table      # prints the table from the raw data only
    python benchmarks/normalizer_free.py --free nf_resnet50 --norm resnet50 --size 64 --device cuda

The data are Fashion-MNIST, the networks are those of timm, and the application trains them. There are three
experiments, with one JSON file for each run:

1. Learning rates. The network without normalisation is trained with a batch size of 128 by SGD and AGC-SGD with the
   same momentum, at learning rates a factor of two apart. A run has diverged if its loss is not finite, or if at the
   end it is not below the loss of guessing.
2. Batch size. The network without normalisation (AGC-SGD) and the related network with BatchNorm (SGD) are trained at
   batch sizes 128, 16 and 4 for the same number of epochs, with the best of four learning rates: half to four times
   the learning rate proportional to the batch size. The result is the accuracy that each loses from 128 to 16 and to 4.
   A smaller batch also means more steps per epoch.
3. Small batches per device. The batch size is 128 and the number of steps is the same throughout, but each batch is
   computed in parts of 16, 4 and 2 images, as on devices with little memory (or with gradient accumulation). The
   statistics of BatchNorm depend on the parts; the other network does not depend on them.

Learning rates are constant. The application leaves out incomplete batches, so 30,000 images are 234 batches of 128.
The first seed chooses the learning rate of each batch size by its accuracy. The other seeds (``--seeds``) use this
learning rate only, and the loss of accuracy is their mean. The benchmark does not compare the two networks with each
other, because they differ in more than the normalisation.
"""

import argparse
import statistics
from dataclasses import replace

from normalizer_free_run import STORE, Run
from torch_thor.bench import markdown, script, write_tables

RATES = [0.05, 0.1, 0.2, 0.4, 0.8]
BATCHES = [128, 16, 4]
PARTS = {"sgd": [16, 4, 2], "agc-sgd": [16, 4]}  # without norms parts change nothing: two are enough to see it
SHARES = [0.5, 1, 2, 4]  # of the learning rate that is in proportion to the batch
RATE_AT_128 = 0.05


def runs(options: argparse.Namespace) -> list[Run]:
    """List the trainings of the first seed.

    Args:
        options: the command line.

    Returns:
        Both questions' runs.
    """
    rest = {"images": options.images, "size": options.size, "seed": 0, "device": options.device}
    found = [Run("rates", options.free, o, 128, lr, **rest) for o in ("sgd", "agc-sgd") for lr in RATES]
    for model, optimizer in ((options.free, "agc-sgd"), (options.norm, "sgd")):
        rates = [(b, share * RATE_AT_128 * b / 128) for b in BATCHES for share in SHARES]
        found += [Run("batches", model, optimizer, b, lr, **rest) for b, lr in rates]
    return found


def best(first: list[Run]) -> list[Run]:
    """Choose the learning rates of the second question.

    Args:
        first: the runs of the first seed.

    Returns:
        For each network and batch size the run with the highest accuracy, of those that are there.
    """
    chosen: dict[tuple[str, int], tuple[float, Run]] = {}
    for run in first:
        if run.question == "batches" and STORE.holds(run.key):
            accuracy = run.result()["accuracy"]
            if accuracy > chosen.get((run.model, run.batch), (-1.0, run))[0]:
                chosen[run.model, run.batch] = (accuracy, run)
    return [run for _, run in chosen.values()]


def parts(first: list[Run]) -> list[Run]:
    """List the runs of the third question, with the learning rates that were chosen for the whole batch.

    Args:
        first: the runs of the first seed.

    Returns:
        A run for each network and size of the parts.
    """
    whole = [run for run in best(first) if run.batch == BATCHES[0]]
    return [replace(run, question="parts", part=part) for run in whole for part in PARTS[run.optimizer]]


def of_seeds(planned: list[Run], seeds: range) -> list[Run]:
    """List the runs of the other seeds, of the second question and the third.

    Args:
        planned: the runs of the first seed.
        seeds: the other seeds.

    Returns:
        Those with the chosen learning rates.
    """
    return [replace(run, seed=seed) for seed in seeds for run in [*best(planned), *parts(planned)]]


def table(planned: list[Run], seeds: range) -> str:
    """Return the results as Markdown, from the runs there are.

    Args:
        planned: the runs of the first seed.
        seeds: those that train with the chosen learning rates.

    Returns:
        Two tables.
    """
    heads = ("network", "optimizer", "batch", "lr", "diverged", "accuracy (each seed)", "units clipped")
    rows = []
    for run in planned:
        if STORE.holds(run.key):
            found = run.result()
            clipped = found["share_of_units_clipped"]
            rows.append(
                (
                    run.model,
                    run.optimizer,
                    str(run.batch),
                    f"{run.lr:g}",
                    f"{found['diverged']:d} of 1",
                    f"{found['accuracy']:.3f}",
                    "-" if clipped is None else f"{clipped:.0%}",
                )
            )
    first = markdown.table(heads, rows)
    heads = ("network", "optimizer", "batch", "lr", "accuracy, mean (each seed)", "against batch 128")
    rows = []
    means: dict[tuple[str, int], float] = {}
    for run in [*best(planned), *parts(planned)]:
        each = [one for seed in seeds if STORE.holds((one := replace(run, seed=seed)).key)]
        accuracies = [one.result()["accuracy"] for one in each]
        if not accuracies:
            continue
        mean = statistics.fmean(accuracies)
        means.setdefault((run.model, run.batch), mean)
        rows.append(
            (
                run.model,
                run.optimizer,
                f"{run.batch} in parts of {run.part}" if run.part else f"{run.batch}",
                f"{run.lr:g}",
                markdown.middle(accuracies, ".3f", of=statistics.fmean),
                f"{100 * (mean - means[run.model, BATCHES[0]]):+.1f} points",
            )
        )
    text = f"{first}\n\n{markdown.table(heads, rows)}"
    write_tables(STORE.folder, text)
    return text


def main() -> None:
    """Run what is missing and print the table."""
    parser = script.parser(__doc__, workers=1)  # the device may be a GPU
    parser.add_argument("--free", default="test_nfnet", help="the network without norms: nf_resnet50, nfnet_f0, ...")
    parser.add_argument("--norm", default="test_resnet", help="its relative with BatchNorm")
    parser.add_argument("--images", type=int, default=30_000, help="training images that a run sees")
    parser.add_argument("--size", type=int, default=28, help="height and width of the images")
    parser.add_argument("--seeds", type=int, default=2, help="seeds of the chosen learning rates")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    options = parser.parse_args()
    planned, seeds = runs(options), range(1, options.seeds + 1)
    if not options.table:
        script.measure(STORE, [lambda: planned, lambda: of_seeds(planned, seeds)], options.workers)
    print(table(planned, seeds))


if __name__ == "__main__":
    main()
