"""The golden runs: short trainings that between them go through all that computes.

Each is a function without arguments in `RUNS`; the seeds are fixed, all is float32 (the scalars of
two ranks are added in float64), on one thread.
"""

import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import distributed as dist

from golden.outcome import outcome
from ranks import Ranks as Pool
from torch_thor import THOR, ThorMuon
from torch_thor.errors import UserError
from torch_thor.training.loop import Record, train
from torch_thor.training.parallel import Ranks
from torch_thor.training.recipes import load_recipe
from torch_thor.training.run import build
from torch_thor.training.tasks.opening import open_task

KEPT = {"train": 2048, "test": 500}  # images of Fashion-MNIST: 16 steps an epoch
_POOL = Pool(most=2)


class UnavailableError(Exception):
    """Something that a run needs is not on this machine; the message says what."""


def application(recipe, *words, change=lambda task: None, ranks=None):
    """Train a recipe as the command line does, without its files."""
    loaded, ranks = load_recipe(recipe, ["device=cpu", *words]), ranks or Ranks()
    try:
        task = open_task(loaded, ranks.device, lambda _: None)
    except UserError as error:
        raise UnavailableError(str(error)) from error
    change(task)
    run = build(loaded, loaded.optimizer[0], task, ranks)
    train(run, [record := Record()])
    steps = [(point.step, point.loss, point.events) for point in record.points]
    return outcome([recipe, *words], steps, record.scores, run.optimizer, run.model)


def first_images(task):
    many, few = KEPT["train"], KEPT["test"]
    task.train, task.test = [part[:many] for part in task.train], [part[:few] for part in task.test]
    task.samples, task.held_out_samples = many, few
    task.steps_per_epoch = many // task.recipe.batch_size


def image_folder(*words):
    """Train on files: random crops, flips, grey and broken images, read in this process."""
    from image_tree import write_tree

    with tempfile.TemporaryDirectory() as folder:
        write_tree(Path(folder))
        found = application(*words, f"data.root={folder}")
    return {**found, "settings": [*words]}


def two_ranks(recipe, *words):
    """Train a recipe on two processes, under DDP: weights and optimizer are the same on both."""
    if not (dist.is_available() and dist.is_gloo_available()):
        raise UnavailableError("this torch has no gloo")
    with tempfile.TemporaryDirectory() as folder:
        first, second = _POOL.run(2, Path(folder), _on_rank, recipe, words)
    assert first == second, "the two ranks differ"
    return first


def _on_rank(rank, world, recipe, words):
    with settled():
        return application(recipe, *words, ranks=Ranks(rank, world))


def end_ranks():
    """End the processes, if there are any."""
    _POOL.close()


def every_layer(steps, method=THOR, before=0, **options):
    """Train `EveryLayer` in a plain loop, padding left out of the statistics.

    Before that AdamW may train it for some steps, so that it is fine-tuned.
    """
    from golden.layers import LENGTH, PADDING, EveryLayer, batches, loss_of  # slow to import

    torch.manual_seed(0)
    model = EveryLayer()
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
    for images, tokens in batches(before):
        loss_of(model(images, tokens[:, :LENGTH]), tokens).backward()
        adamw.step()
        adamw.zero_grad()
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    others = [p for name, p in model.named_parameters() if "norm" not in name]
    optimizer = method(
        [{"params": others, "weight_decay": 0.01}, {"params": norms}], model=model, **options
    )
    found = []
    for step, (images, tokens) in enumerate(batches(steps), 1):
        optimizer.row_mask = tokens[:, :LENGTH] != PADDING
        optimizer.loss_terms = int((tokens[:, 1:] != PADDING).sum())
        loss = loss_of(model(images, tokens[:, :LENGTH]), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append((step, loss.item(), optimizer.last_refresh))
    given = {"steps": steps, **({"before": before} if before else {}), **options}
    settings = [f"{key}={value!r}" for key, value in given.items()]
    return outcome(settings, found, [], optimizer, model)


@contextmanager
def settled():
    """One thread, and the random numbers of the program as they were."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(threads)


# Under these there are layers that take new factors, that keep what they have, and that stop.
TRACE_RULE = ("damping=0.003", "trace_thresholds=[0.1,0.0022]")
# a run belongs to the optimizer that it trains
RUNS_OF = {
    "THOR": {
        "digits": partial(
            application, "digits", "optimizer=thor", "epochs=2", "update_interval=5", *TRACE_RULE
        ),
        "digits-paper": partial(
            application, "digits", "optimizer=thor", "epochs=1", "lr=0.01", "damping=0.01",
            "max_update_ratio=null", "update_interval=5", "trace_thresholds=thor",
            "split_dim=null",
        ),
        "digits-options": partial(
            application, "digits", "optimizer=thor", "epochs=1", "fisher=sampled",
            "accumulation=2", "kl_clip=0.01", "split_dim=24", "factor_decay=0.7", "nesterov=true",
            "weight_decay=0.01", "decay_filter='*.weight'", "layers=[-head]",
            "update_interval={kind: geometric, first: 1, last: 8, factor: 1.5}",
            "trace_thresholds=thor_nt", "label_smoothing=0.1", "ema_decay=0.9",
            "damping_schedule.kind=linear",
        ),
        # Nesterov's momentum without kl_clip: other rounding than the options beside it
        "digits-nesterov": partial(
            application, "digits", "optimizer=thor", "epochs=1", "nesterov=true",
            "weight_decay=0.001", "update_interval=5",
        ),
        "fashion-mnist": partial(
            application, "fashion-mnist", "data.download=false", "optimizer=thor", "epochs=2",
            "update_interval=6", change=first_images,
        ),
        "image-folder": partial(
            image_folder, "digits", "optimizer=thor", "data.name=image-folder",
            "data.workers.count=0", "data.max_broken=0.5", "data.transform.size=24",
            "data.transform.resize=28", "model=small-resnet", "batch_size=8", "epochs=12",
            "update_interval=4", "lr=0.05",
        ),
        "two-ranks": partial(
            two_ranks, "digits", "optimizer=thor", "epochs=1", "update_interval=5", *TRACE_RULE
        ),
        "every-layer": partial(
            every_layer, 40, lr=0.02, damping=0.05, update_interval=4,
            trace_thresholds=(0.2, 0.03), split_dim=24, factor_decay=0.3,
        ),
    },
    "ThorMuon": {
        # at 0.08, the default lr, rounding grows so fast that another machine is past the
        # tolerance in ten steps
        "digits-scale-free": partial(
            application, "digits", "optimizer=thor-muon", "epochs=2", "lr=0.04",
            "weight_decay=0.01",
        ),
        "two-ranks-scale-free": partial(two_ranks, "digits", "optimizer=thor-muon", "epochs=1"),
        "every-layer-scale-free": partial(every_layer, 40, ThorMuon, lr=0.02, split_dim=24),
        "every-layer-fine-tuned": partial(every_layer, 20, ThorMuon, before=100, split_dim=24),
    },
    "AGCSGD": {
        "digits-agc-sgd": partial(
            application, "digits", "optimizer=agc-sgd", "epochs=1", "clip_factor=0.02",
            "momentum=0.9", "nesterov=true", "weight_decay=0.001",
        ),
    },
    "LAMB": {"digits-lamb": partial(application, "digits", "optimizer=lamb", "epochs=1")},
}  # fmt: skip
RUNS = {name: run for own in RUNS_OF.values() for name, run in own.items()}
