"""The commands of the command line.

Each imports what it needs when it runs, so that --help is fast.
"""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from typer import Argument, Option

from torch_thor import __version__
from torch_thor.errors import is_first_rank, print_message, require
from torch_thor.printing import columns, printer

FIRST_RECIPE = "characters"  # of `torch-thor train` without a name

app = typer.Typer(
    name="torch-thor",
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
Device = Annotated[str, Option(help="The device: cpu, cuda, ..., or auto: a GPU if available.")]


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"torch-thor {__version__}")
        raise typer.Exit


@app.command()
def train(
    words: Annotated[
        list[str] | None,
        Argument(
            metavar="[RECIPE] [KEY=VALUE]...",
            help="A recipe or a YAML file, then keys to override.",
        ),
    ] = None,
    out: Annotated[Path | None, Option(help="The run folder (default: runs/RECIPE).")] = None,
    resume: Annotated[
        bool, Option("--resume", help="Continue the run from its newest checkpoint.")
    ] = False,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Delete the run, and start anew.")
    ] = False,
    list_recipes: Annotated[bool, Option("--list", help="List the recipes.")] = False,
) -> None:
    """Train a recipe, and compare its optimizers.

    Writes curves, metrics, the recipe and checkpoints into the run folder. Ctrl-C saves a
    checkpoint; `--resume` continues from it, bit for bit, with the settings of the run.

    - `torch-thor train` compares three optimizers on a small transformer, in about a minute

    - `torch-thor train digits optimizer=thor-muon,adamw epochs=3 --out runs/mine`
    """
    from torch_thor.training.recipes import load_recipe, recipe_list

    if list_recipes:
        for name, about in recipe_list():
            typer.echo(f"{name:<30}  {about}")
        return
    from torch_thor.training.folder import RunFolder
    from torch_thor.training.run import run_recipe

    require(not (resume and overwrite), "--resume and --overwrite exclude each other: choose one")
    names = [word for word in words or [] if "=" not in word]
    require(
        len(names) < 2,
        f"'{' '.join(names)}' names more than one recipe: give one, then key=value words",
    )
    name, overrides = (names or [FIRST_RECIPE])[0], [word for word in words or [] if "=" in word]
    folder = RunFolder(out or Path("runs") / Path(name).stem)
    resume = resume or folder.is_restarted
    recipe = folder.continued(overrides) if resume else load_recipe(name, overrides)
    require(
        not (resume and names) or load_recipe(name).name == recipe.name,
        f"{folder.path} belongs to recipe {recipe.name}, not {name}: leave {name} out, or "
        "choose another folder with --out",
    )
    run_recipe(recipe, folder, Console(), resume=resume, overwrite=overwrite)
    if not names and is_first_rank():
        typer.echo(
            "next: optimizer = torch_thor.ThorMuon(model) in your own loop; your own text: "
            "torch-thor prepare FOLDER --out corpus, then torch-thor train bert-mini "
            "data.root=corpus"
        )


@app.command("eval")
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
    `RUN/OPTIMIZER/checkpoints/best` stands for the best. The keys device, batch_size, threads
    and those inside data can be overridden. An image folder needs to contain only the evaluation
    images. Under `torchrun` the processes share the data.

    - `torch-thor eval runs/mine data.root=/moved/images data.workers.count=8 --json`
    """
    from torch_thor.training.run import evaluate_saved

    rows, metrics = evaluate_saved(path, words or [], print_message)
    if not is_first_rank():
        return
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    shown = [metric for metric in metrics if metric.primary or metric.name != "loss"]
    cells = [
        [
            f"{row['optimizer']}, averaged weights" if row["averaged"] else row["optimizer"],
            str(row["step"]),
            *(metric.text(row[metric.name]) for metric in shown),
        ]
        for row in rows
    ]
    Console().print(
        columns("", ["optimizer", "step", *(metric.title for metric in shown)], cells, left=1)
    )


@app.command("prepare")
def prepare_text(
    sources: Annotated[
        list[str],
        Argument(metavar="SOURCE...", help="Files of text, folders, python."),
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
            help="What all files are (default: their endings tell): text, bert, jsonl, parquet.",
        ),
    ] = None,
    language: Annotated[str, Option(help="Language code, for the rules of sentence ends.")] = "en",
    workers: Annotated[
        int | None, Option(help="Number of processes (default: one per core that it may use).")
    ] = None,
) -> None:
    """Prepare text for masked-language-model training.

    SOURCE is a file, a folder of files, or `python`, the language reference that is part of Python.
    Files are plain text, BERT's format (a sentence a line, a blank line after a document), JSON
    lines or Parquet with a `text`; text and JSON lines may be compressed (.gz, .bz2, .xz).

    - `torch-thor prepare wikipedia.parquet --out corpora/wikipedia --workers 16`
    """
    from torch_thor.training.data.batches import allowed_cores
    from torch_thor.training.text.prepare import prepare

    prepare(
        sources, out, vocab_size=vocab_size, lowercase=not cased,
        lengths=_numbers("--seq-len", seq_len), seed=seed,
        held_out=held_out, language=language, form=form, tokenizer=tokenizer,
        workers=allowed_cores() if workers is None else workers,
        console=Console(),
    )  # fmt: skip


@app.command("export")
def export_network(
    path: Annotated[
        Path, Argument(metavar="RUN_OR_CHECKPOINT", help="A checkpoint, or RUN/OPTIMIZER.")
    ],
    out: Annotated[Path, Option(help="The folder to write.")],
    averaged: Annotated[bool, Option("--averaged", help="Export the averaged weights.")] = False,
) -> None:
    """Write a trained network in the format of another library.

    A network of `task: masked-lm` becomes a folder for `from_pretrained` of transformers, with its
    tokenizer.

    - `torch-thor export runs/bert-tiny/thor-muon --out bert-tiny`, then
      `AutoModel.from_pretrained("bert-tiny")`
    """
    from torch_thor.training.run import export

    export(path, out, print_message, averaged=averaged)


@app.command("split-dim")
def choose_split_dim(
    model: Annotated[
        str, Argument(metavar="MODEL", help="A torchvision or timm name, or FILE.py:FUNCTION.")
    ],
    optimizer: Annotated[Literal["thor-muon", "thor"], Option(help="The optimizer.")] = "thor-muon",
    device: Device = "auto",
    batch: Annotated[int, Option(min=1, help="Number of sample images.")] = 32,
    pixels: Annotated[int, Option(min=1, help="Height and width of the sample images.")] = 224,
    data: Annotated[
        Path | None, Option(help="A folder of images (default: two photographs).")
    ] = None,
    seed: Annotated[
        int, Option(min=0, max=2**63 - 1, help="Seed of the weights and the crops.")
    ] = 0,
    out: Annotated[
        Path | None, Option(help="The folder to write (default: runs/split-dim-MODEL).")
    ] = None,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Replace the results that are there.")
    ] = False,
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


@app.command("plan")
def make_plan(
    subject: Annotated[
        str, Argument(help="A recipe, a name of torchvision, timm or BERT, or FILE.py:FUNCTION.")
    ],
    words: Words = None,
    devices: Annotated[str, Option(help="Numbers of devices, separated by commas.")] = "1,8,64,256",
    shards: Annotated[
        int, Option(min=2, help="Devices that hold one copy of the weights with HSDP.")
    ] = 8,
    optimizer: Annotated[
        Literal["thor-muon", "thor"] | None,
        Option(help="thor-muon or thor (default: the recipe's, or thor-muon)."),
    ] = None,
    split_dim: Annotated[
        int | None, Option(min=1, help="Block size of the factors (default: the recipe's).")
    ] = None,
    batch: Annotated[
        int | None,
        Option(min=1, help="Samples on a device, to measure times with (default: none)."),
    ] = None,
    samples: Annotated[
        int, Option(min=1, help="Samples of all epochs, for the time of a training.")
    ] = 1_000_000,
    bandwidth: Annotated[
        float, Option(min=1e-6, help="GB/s that a device sends over the slowest links.")
    ] = 50.0,
    latency: Annotated[
        float, Option(min=0, help="Microseconds of a round of a ring in addition.")
    ] = 14.0,
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


@app.command("keys")
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
    require(
        all(word.isdecimal() and int(word) >= 1 for word in words),
        f"{option} {text}: must be whole numbers of at least 1, separated by commas",
    )
    return tuple(map(int, words))
