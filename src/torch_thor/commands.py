"""The commands of the command line.

Each imports what it needs when it runs, so that --help is fast.
"""

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Argument, Option
from typer.core import TyperCommand, TyperGroup

from torch_thor import __version__
from torch_thor.errors import require
from torch_thor.printing import cell, columns, is_first_rank, print_message, printer
from torch_thor.training.cores import allowed_cores
from torch_thor.training.errors import StoppedError

FIRST_RECIPE = "characters"  # of `torch-thor train` without a name


class _WithFlags:
    """Shows no type of the flags among the parameters in the help."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class _Command(_WithFlags, TyperCommand):
    """A command."""


class _Group(_WithFlags, TyperGroup):
    """The program, which has commands."""


app = typer.Typer(
    name="torch-thor",
    cls=_Group,
    help="Train networks with ThorMuon and THOR, and compare them with other optimizers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
# the options that several commands have
Words = Annotated[
    list[str] | None, Argument(metavar="[KEY=VALUE]...", help="Keys of the recipe to override.")
]
Device = Annotated[
    str, Option(help="The device: cpu, cuda, ..., or auto for a GPU if there is one.")
]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace the results that are there.")]


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, Option("--version", help="Print the version.")] = False,
    list_recipes: Annotated[bool, Option("--list", hidden=True)] = False,
) -> None:
    require(not list_recipes, "--list belongs to a command: `torch-thor train --list`")
    if version:
        typer.echo(f"torch-thor {__version__}")
        raise typer.Exit


@app.command(cls=_Command)
def train(
    words: Annotated[
        list[str] | None,
        Argument(
            metavar="[RECIPE] [KEY=VALUE]...",
            help="A recipe or a YAML file, then keys to override.",
        ),
    ] = None,
    out: Annotated[
        Path | None, Option(help="The run folder (default: a new one, runs/RECIPE).")
    ] = None,
    resume: Annotated[
        bool, Option("--resume", help="Continue the run from its newest checkpoint.")
    ] = False,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Delete the run, and start anew.")
    ] = False,
    profile: Annotated[
        bool, Option("--profile", help="Profile a few steps, one refresh among them.")
    ] = False,
    list_recipes: Annotated[bool, Option("--list", help="List the recipes.")] = False,
) -> None:
    """Train a recipe, and compare its optimizers.

    Writes curves, metrics, the recipe and checkpoints into the run folder. Ctrl-C saves a
    checkpoint; `--resume` continues from it, bit for bit, with the settings of the run. Without
    `--out`, it continues the latest run.

    - `torch-thor train` compares three optimizers on a small transformer, in about a minute

    - `torch-thor train digits optimizer=thor-muon,adamw epochs=3 --out runs/mine`
    """  # noqa: DOC501  # it is the help
    from torch_thor.training.recipes import load_recipe, recipe_list

    console = Console()
    if list_recipes:
        for name, about in recipe_list():
            console.print(
                cell(f"{name:<30}  {about}"),
                no_wrap=True,
                crop=console.is_terminal,
                overflow="ignore",
            )
        return
    from torch_thor.training.folder import RunFolder
    from torch_thor.training.origin import read_origin
    from torch_thor.training.run import run_recipe
    from torch_thor.training.tasks.opening import task_class

    names = [word for word in words or [] if "=" not in word]
    require(
        len(names) < 2,
        f"'{' '.join(names)}' names more than one recipe: give one, then key=value words",
    )
    name, overrides = (names or [FIRST_RECIPE])[0], [word for word in words or [] if "=" in word]
    path = Path("runs") / Path(name).stem
    # a run that continues may be that of any recipe, if none is named
    origin = None if resume and not names else read_origin(name)
    folder = (
        RunFolder(out, origin)
        if out
        else RunFolder.named(path, origin, resume=resume, overwrite=overwrite)
    )
    stored = folder.stored() if resume else None
    # keys that are changed nowhere keep the values of the run
    recipe = load_recipe(name, overrides) if stored is None else folder.continued(stored, overrides)
    try:
        run_recipe(recipe, folder, console, resume=resume, overwrite=overwrite, profile=profile)
    except StoppedError as stop:
        command = ["torch-thor", "train", *names, "--resume", "--out", str(folder.path)]
        raise StoppedError(stop.step, shlex.join(command)) from stop
    if not names and is_first_rank():
        printer(console)(
            "next: optimizer = torch_thor.ThorMuon(model) in your own loop; "
            + task_class(recipe.task).own_data
        )


@app.command("eval", cls=_Command)
def evaluate(
    path: Annotated[
        Path, Argument(metavar="RUN_OR_CHECKPOINT", help="A run folder, or a checkpoint in it.")
    ],
    words: Words = None,
    as_json: Annotated[
        bool, Option("--json", help="Print all metrics in full precision, as JSON.")
    ] = False,
) -> None:
    """Evaluate a trained network on the test set.

    For a run folder, the newest undamaged checkpoint of each optimizer is evaluated. The path
    `RUN/OPTIMIZER/checkpoints/best` stands for the best one. The keys device, batch_size, threads
    and those inside data can be overridden. An image folder needs to contain only the evaluation
    images. Under `torchrun` the processes share the data.

    - `torch-thor eval runs/mine data.root=/moved/images data.workers.count=8 --json`
    """
    from torch_thor.training.run import evaluate_saved

    scores = evaluate_saved(path, words or [], print_message)
    if as_json and is_first_rank():
        rows = [
            {
                **{key: getattr(score, key) for key in ("optimizer", "averaged", "step", "path")},
                score.unit.replace(" ", "_"): score.number,
                **score.values,
            }
            for score in scores
        ]
        typer.echo(json.dumps(rows, indent=2, default=str))
    if as_json or not is_first_rank():
        return
    shown = [metric for metric in scores[0].metrics if metric.primary or metric.name != "loss"]
    cells = [
        [
            f"{score.optimizer}, averaged weights" if score.averaged else score.optimizer,
            str(score.step),
            *(metric.text(score.values[metric.name]) for metric in shown),
        ]
        for score in scores
    ]
    headings = ["optimizer", "step", *(metric.title for metric in shown)]
    Console().print(columns("", headings, cells, left=1))


@app.command("prepare", cls=_Command)
def prepare_text(
    sources: Annotated[
        list[str],
        Argument(metavar="SOURCE...", help="Files of text, folders, names of the hub, python."),
    ],
    out: Annotated[Path, Option(help="The folder of the prepared corpus.")],
    vocab_size: Annotated[int, Option(help="Size of the vocabulary to train.")] = 30522,
    seq_len: Annotated[
        str, Option(help="Tokens of an example: one length, or several with commas.")
    ] = "128,512",
    tokenizer: Annotated[
        Path | None, Option(help="A tokenizer.json or vocab.txt (default: train one).")
    ] = None,
    cased: Annotated[bool, Option("--cased", help="Keep upper case and accents.")] = False,
    held_out: Annotated[
        float, Option(help="Fraction of the documents that is kept for evaluation.")
    ] = 0.01,
    seed: Annotated[int, Option(help="Seed of the choice of these documents.")] = 0,
    form: Annotated[
        str | None,
        Option(
            "--format",
            help="What files are (default: they tell): text, bert, html, doc, jsonl, parquet, "
            "wikitext.",
        ),
    ] = None,
    language: Annotated[str, Option(help="Language code, for the rules of sentence ends.")] = "en",
    workers: Annotated[
        int | None, Option(help="Number of processes (default: one per core that it may use).")
    ] = None,
    max_faults: Annotated[
        float, Option(help="Largest fraction of documents that may be unreadable.")
    ] = 0.01,
) -> None:
    """Prepare text for masked-language-model training.

    SOURCE is a file, or a folder of files: cleaned articles of Wikipedia as Parquet or JSON lines
    with a `text`, WikiExtractor's output, BERT's format (a sentence a line, a blank line after a
    document), text or HTML. Files may be compressed (.gz, .bz2, .xz). Where there is a network, it
    may be a data set of the hub, as OWNER/NAME:CONFIGURATION. `python` stands for the documentation
    that is part of Python. If the preparation is stopped, the same command continues it.

    - `torch-thor prepare wikimedia/wikipedia:20231101.en --out corpora/wikipedia --workers 16`
    """
    from torch_thor.training.text.prepare import prepare

    prepare(
        sources, out, vocab_size=vocab_size, lowercase=not cased,
        lengths=_numbers("--seq-len", seq_len), seed=seed,
        held_out=held_out, language=language, form=form, tokenizer=tokenizer,
        workers=allowed_cores() if workers is None else workers,
        max_faults=max_faults, console=Console(),
    )  # fmt: skip


@app.command("export", cls=_Command)
def export_network(
    path: Annotated[
        Path, Argument(metavar="RUN_OR_CHECKPOINT", help="A checkpoint, or RUN/OPTIMIZER.")
    ],
    out: Annotated[Path, Option(help="The folder to write.")],
    form: Annotated[
        str, Option("--format", help="The format; transformers is the only one.")
    ] = "transformers",
    averaged: Annotated[bool, Option("--averaged", help="Export the averaged weights.")] = False,
) -> None:
    """Write a trained network in the format of another library.

    A network of `task: masked-lm` becomes a folder for `from_pretrained` of transformers, with its
    tokenizer.

    - `torch-thor export runs/bert-tiny/thor-muon --out bert-tiny`, then
      `AutoModel.from_pretrained("bert-tiny")`
    """
    from torch_thor.training.run import export

    export(path, out, form, print_message, averaged=averaged)


@app.command("split-dim", cls=_Command)
def choose_split_dim(
    model: Annotated[
        str, Argument(metavar="MODEL", help="A torchvision or timm name, or FILE.py:FUNCTION.")
    ],
    optimizer: Annotated[str, Option(help="thor-muon or thor.")] = "thor-muon",
    device: Device = "auto",
    batch: Annotated[int, Option(help="Number of sample images.")] = 32,
    pixels: Annotated[int, Option(help="Height and width of the sample images.")] = 224,
    data: Annotated[
        Path | None, Option(help="A folder of images (default: two photographs).")
    ] = None,
    seed: Annotated[int, Option(help="Seed of the weights and the crops.")] = 0,
    out: Annotated[
        Path | None, Option(help="The folder to write (default: runs/split-dim-MODEL).")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Choose the split dimension of an optimizer for a model on this device.

    Cuts every factor into blocks of 1, 16, 32, ... rows, measures the loss of spectral norm and the
    time to invert the blocks (and, for ThorMuon, to orthogonalise), and chooses the block size
    where the two curves cross. Prints tables, and writes `split_dim.png` and `split_dim.json`.

    - `torch-thor split-dim timm:vit_tiny_patch16_224 --device cuda --data photographs/`

    - `torch-thor split-dim mine.py:build`, for a function that returns a model,
      `(model, sample_batch)` or `(model, sample_batch, loss_fn)`
    """
    given = locals()
    from torch_thor.tools.split_dim import split_dim

    folder = given.pop("out") or Path("runs") / f"split-dim-{Path(model).name.replace(':', '-')}"
    split_dim(given.pop("model"), folder, Console(), **given)


@app.command("plan", cls=_Command)
def make_plan(
    subject: Annotated[
        str, Argument(help="A recipe, a name of torchvision, timm or BERT, or FILE.py:FUNCTION.")
    ],
    words: Words = None,
    devices: Annotated[str, Option(help="Numbers of devices, separated by commas.")] = "1,8,64,256",
    shards: Annotated[int, Option(help="Devices that hold one copy of the weights with HSDP.")] = 8,
    optimizer: Annotated[
        str | None, Option(help="thor-muon or thor (default: that of the recipe, or thor-muon).")
    ] = None,
    split_dim: Annotated[
        int | None, Option(help="Block size of the factors (default: the recipe's).")
    ] = None,
    batch: Annotated[
        int | None, Option(help="Samples on a device, to measure times with (default: none).")
    ] = None,
    samples: Annotated[
        int | None, Option(help="Samples of all epochs, for the time of a training.")
    ] = None,
    bandwidth: Annotated[
        float, Option(help="GB/s that a device sends over the slowest links.")
    ] = 50.0,
    latency: Annotated[float, Option(help="Microseconds of a round of a ring in addition.")] = 14.0,
    device: Device = "auto",
    out: Annotated[Path | None, Option(help="The folder of plan.json (default: none).")] = None,
) -> None:
    """Compute what ThorMuon or THOR keeps and sends on many devices, before renting them.

    The bytes are exact. With `--batch`, a step is measured on this device, and the times of all
    others follow from it and from the links.

    - `torch-thor plan bert-large --batch 8 --devices 64,256 --bandwidth 25`
    """
    given = locals()  # the options by name
    from torch_thor.tools.device_plan import plan

    given |= {"words": words or (), "devices": _numbers("--devices", devices)}
    plan(given.pop("subject"), Console(), **given)


@app.command("keys", cls=_Command)
def list_keys(
    part: Annotated[
        str | None, Argument(metavar="[PART]", help="Such as training, data or thor-muon.")
    ] = None,
) -> None:
    """List the keys of recipes."""
    from torch_thor.training.recipes import PARTS, keys

    say = printer(Console())
    for name, kind, default, meaning in keys(part):
        say(f"{name} = {default} ({kind}): {meaning}")
    if part is None:
        say(f"Further keys: `torch-thor keys PART` for {', '.join(PARTS)}")


def _numbers(option: str, text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    fit = all(word.isdecimal() and int(word) >= 1 for word in words)
    require(fit, f"{option} {text}: must be whole numbers of at least 1, separated by commas")
    return tuple(map(int, words))
