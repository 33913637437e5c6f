"""The command line: it parses the arguments, calls the application, and prints a `UserError` as one line."""

import errno
import json
import os
import shlex
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

from torch_thor import __version__
from torch_thor.training.errors import CTRL_C, INTERRUPTED, USER_ERROR, ElsewhereError, StoppedError, UserError

try:
    import typer
    from rich.console import Console
    from rich.table import Table
    from typer.core import TyperGroup
except ModuleNotFoundError as error:
    raise SystemExit(
        f"torch-thor: {error.name} is missing: install it with `pip install 'torch-thor[train]'`"
    ) from error
except KeyboardInterrupt:
    sys.stderr.write(f"torch-thor: {CTRL_C}\n")
    raise SystemExit(INTERRUPTED) from None

from torch_thor.training.printing import cell, visible

# What a disk, a network share or a limit on open files may do at any moment
OUTSIDE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE}


class _InterruptedError(Exception):
    """Ctrl-C, in a form that typer passes on."""


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise _InterruptedError from error


app = typer.Typer(
    name="torch-thor",
    cls=_Commands,
    help="Train networks with THOR, the trace-based natural-gradient optimizer, and compare it with others.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"torch-thor {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


@app.command(
    help="""Train a recipe and compare its optimizers.

Writes curves, metrics, the recipe as run and checkpoints into the run folder, and ends with a table.
Ctrl-C leaves a checkpoint; `--resume` goes on from it, bit for bit.

Examples:

- `torch-thor train` trains with THOR and with SGD on handwritten digits, in less than a minute

- `torch-thor train fashion-mnist optimizer=thor lr=0.1`

- `torch-thor train digits optimizer=thor,adamw epochs=3 schedule.kind=linear --out runs/mine`
"""
)
def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [KEY=VALUE]...",
            help="A recipe's name or YAML file (default: digits), then keys to override.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The run folder (default: runs/RECIPE).", show_default=False)
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on from the newest whole checkpoint, with the settings of the run."),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Throw away the run in the folder.")] = False,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Profile a few steps, a refresh among them, into OPTIMIZER/profile/; go on."),
    ] = False,
    list_recipes: Annotated[bool, typer.Option("--list", help="List the recipes and their keys, and stop.")] = False,
) -> None:
    """Train a recipe and compare its optimizers.

    Args:
        words: The recipe and the overrides.
        out: The run folder.
        resume: Go on with the run in the folder.
        overwrite: Throw away the run in the folder.
        profile: Profile a few steps of each optimizer.
        list_recipes: List the recipes and their keys instead.

    Raises:
        UserError: If more than one recipe is named.
        StoppedError: If a signal stopped the training.
    """
    from torch_thor.training.checkpoints.run_folder import RunFolder
    from torch_thor.training.config.keys import key_tables
    from torch_thor.training.config.recipe_files import DEFAULT_RECIPE, load_recipe, name_of, recipe_list
    from torch_thor.training.config.recipe_text import override
    from torch_thor.training.experiment import run_recipe

    if list_recipes:
        table = Table("recipe", "about", "should reach", show_lines=True)
        for row in recipe_list():
            table.add_row(*map(cell, row))
        Console().print(table)
        for keys in key_tables():
            Console().print(keys)
        return
    names = [word for word in words or [] if "=" not in word]
    if len(names) > 1:
        raise UserError(f"'{' '.join(names)}' names more than one recipe: give one, then key=value words")
    name = names[0] if names else DEFAULT_RECIPE
    folder = RunFolder(out or Path("runs") / Path(name).stem)
    overrides = [word for word in words or [] if "=" in word]
    stored = folder.stored_recipe() if resume else None
    if stored is not None and (not names or name_of(name) == stored.name):
        recipe = override(stored, overrides)  # what is not said again stays as it was
    else:
        recipe = load_recipe(name, overrides)
    try:
        run_recipe(recipe, folder, Console(), resume=resume, overwrite=overwrite, profile=profile)
    except StoppedError as stop:
        command = ["torch-thor", "train", *names, "--resume", *(["--out", str(out)] if out else [])]
        raise StoppedError(stop.step, shlex.join(command)) from stop


@app.command(
    "eval",
    help="""Print what a trained network reaches on the test set: top-1 and top-5 accuracy, of a classifier.

A run folder is evaluated at the newest whole checkpoint of each of its optimizers, `RUN/OPTIMIZER/checkpoints/best`
at the best one. Of an image folder only the evaluation images must be there. Under `torchrun` the processes share the
data.

Examples:

- `torch-thor eval runs/digits`

- `torch-thor eval runs/mine data.root=/moved/images data.workers.count=8 --json`
""",
)
def evaluate(
    path: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run folder, or one checkpoint in it, or its best/.")
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Keys to override: those of data, device, batch_size, threads."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list, with the loss and all digits, and nothing else.")
    ] = False,
) -> None:
    """Print what a trained network reaches on the test set.

    Args:
        path: A run folder or a checkpoint.
        words: The overrides.
        as_json: Print JSON in the place of a table.
    """
    from torch_thor.training.evaluating import evaluate_saved

    scores = evaluate_saved(path, words or [], _complain)
    if not _is_first():
        return
    if as_json:
        rows = [
            {
                "optimizer": one.optimizer,
                "averaged": one.averaged,
                "step": one.step,
                "path": str(one.path),
                **one.score.metrics,
                one.unit: one.score.terms,
            }
            for one in scores
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    shown = [metric for metric in scores[0].metrics if metric.primary or metric.name != "loss"]
    table = Table("optimizer", "step", *(metric.title for metric in shown))
    for one in scores:
        name = f"{one.optimizer}, averaged weights" if one.averaged else one.optimizer
        table.add_row(cell(name), str(one.step), *(metric.text(one.score.metrics[metric.name]) for metric in shown))
    Console().print(table)


@app.command(
    help="""Prepare text for masked-language-model training.

SOURCE is a Wikipedia dump (`*-pages-articles*.xml.bz2`), a text or HTML file (perhaps .gz, .bz2 or .xz), a folder of
such files, or `python`: the text that every Python carries. Writes a tokenizer, shards of token ids and a manifest. A
preparation that was stopped goes on when the same command is given again.

Examples:

- `torch-thor prepare enwiki-latest-pages-articles.xml.bz2 --out corpora/wikipedia --workers 16`

- `torch-thor prepare /usr/share/doc/anarchism/html --out corpora/anarchism --vocab-size 8192 --seq-len 128`
"""
)
def prepare(
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE...", help="Dumps, files, folders, or python.")],
    out: Annotated[Path, typer.Option("--out", help="The folder of the corpus.")],
    vocab_size: Annotated[int, typer.Option("--vocab-size", help="Word pieces to train.")] = 30522,
    seq_len: Annotated[str, typer.Option("--seq-len", help="Tokens of an example, one length or more.")] = "128,512",
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", help="A tokenizer.json or vocab.txt (default: train one).", show_default=False),
    ] = None,
    cased: Annotated[bool, typer.Option("--cased", help="Keep case and accents.")] = False,
    held_out: Annotated[float, typer.Option("--held-out", help="Share of the documents to evaluate on.")] = 0.01,
    seed: Annotated[int, typer.Option("--seed", help="Decides which documents those are.")] = 0,
    language: Annotated[str, typer.Option("--language", help="For the rules of sentence ends.")] = "en",
    workers: Annotated[
        int | None, typer.Option("--workers", help="Processes (default: one per core).", show_default=False)
    ] = None,
    max_faults: Annotated[
        float, typer.Option("--max-faults", help="Share of documents that may be unreadable.")
    ] = 0.01,
) -> None:
    """Prepare text for masked-language-model training.

    Args:
        sources: Dumps, files, folders, or `python`.
        out: The folder of the corpus.
        vocab_size: Word pieces to train.
        seq_len: Lengths of examples, separated by commas.
        tokenizer: A tokenizer to use in the place of a new one.
        cased: Keep case and accents.
        held_out: Share of the documents to evaluate on.
        seed: Decides which.
        language: For the rules of sentence ends.
        workers: Processes.
        max_faults: Share of documents that may be unreadable.
    """
    from torch_thor.training.text.manifest import Settings
    from torch_thor.training.text.preparing import Preparation
    from torch_thor.training.text.preparing import prepare as prepare_corpus

    settings = Settings(
        vocab_size=vocab_size,
        lowercase=not cased,
        lengths=_lengths(seq_len),
        held_out=held_out,
        seed=seed,
        language=language,
    )
    wanted = Preparation(tuple(sources), out, settings, tokenizer, workers or os.cpu_count() or 1, max_faults)
    prepare_corpus(wanted, Console())


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise UserError(f"--seq-len {text} must be whole numbers separated by commas, such as 128,512") from error


@app.command(
    help="""Write a trained network as another library reads it.

A network of `task: masked-lm` becomes a folder that `from_pretrained` of transformers reads, tokenizer included.

Example:

- `torch-thor export runs/bert-tiny/thor --out bert-tiny`, then `AutoModel.from_pretrained("bert-tiny")`
"""
)
def export(
    path: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A checkpoint, or an optimizer's folder in a run.")
    ],
    out: Annotated[Path, typer.Option("--out", help="The folder to write.")],
    form: Annotated[str, typer.Option("--format", help="transformers")] = "transformers",
    averaged: Annotated[bool, typer.Option("--averaged", help="Take the averaged weights.")] = False,
) -> None:
    """Write a trained network as another library reads it.

    Args:
        path: A checkpoint, or what holds those of one optimizer.
        out: The folder to write.
        form: What reads it.
        averaged: Take the averaged weights.
    """
    from torch_thor.training.exporting import export as export_saved

    export_saved(path, out, form, _complain, averaged=averaged)


@app.command(
    "split-dim",
    help="""Choose THOR's split dimension for a model on this device.

Cuts every factor into blocks of 1, 16, 32, ..., measures what is lost and how long inverting takes, and chooses
where the two curves cross. Prints tables; writes `split_dim.png` and `split_dim.json`.

Examples:

- `torch-thor split-dim resnet50`

- `torch-thor split-dim timm:vit_tiny_patch16_224 --device cuda --data photographs/`

- `torch-thor split-dim mine.py:build`, a function that returns a model, `(model, sample_batch)` or
`(model, sample_batch, loss_fn)`
""",
)
def split_dim(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A torchvision or timm name, or FILE.py:FUNCTION.")],
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, ...; auto takes a GPU if there is one.")] = "auto",
    batch: Annotated[int, typer.Option("--batch", help="Images of the sample.")] = 32,
    pixels: Annotated[int, typer.Option("--pixels", help="Their height and width.")] = 224,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="A folder of images (default: two photographs).", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of weights and crops.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", help="Where results go (default: runs/split-dim-MODEL).", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the results that are there.")] = False,
) -> None:
    """Choose THOR's split dimension for a model on this device.

    Args:
        model: A name, or a function in a file.
        device: Where to measure.
        batch: Images of the sample.
        pixels: Their height and width.
        data: A folder of images.
        seed: Of weights and crops.
        out: Where results go.
        overwrite: Replace results that are there.
    """
    from torch_thor.training.reports.split_report import report_split_dim

    folder = out or Path("runs") / f"split-dim-{Path(model).name.replace(':', '-')}"
    report_split_dim(
        model,
        folder,
        Console(),
        device=device,
        batch=batch,
        pixels=pixels,
        data=data,
        seed=seed,
        overwrite=overwrite,
    )


@app.command(
    help="""Reproduce the paper's figures on small data sets.

Writes NAME.json (raw data), NAME.png and NAME.md into the folder. Raw data with the same settings are drawn again and
not measured again; a measurement that was interrupted goes on with the runs that are missing.

Examples:

- `torch-thor figures curves --data digits` trains on handwritten digits, in a few minutes

- `torch-thor figures batch-sizes --batch-sizes 64,128,256 --epochs 1`

- `torch-thor figures all --redraw` draws what was measured, without training
"""
)
def figures(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A figure, or all.", show_default=False)] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data", help="A recipe: fashion-mnist (the default), digits or a YAML file.", show_default=False
        ),
    ] = None,
    epochs: Annotated[int | None, typer.Option("--epochs", help="Passes over the training set.")] = None,
    eval_interval: Annotated[
        int | None, typer.Option("--eval-interval", help="Steps between evaluations, at the recipe's batch size.")
    ] = None,
    seeds: Annotated[str | None, typer.Option("--seeds", help="One training each, such as 0,1,2.")] = None,
    batch_sizes: Annotated[str | None, typer.Option("--batch-sizes", help="Such as 64,128,256.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Of split-dim: a name, or FILE.py:FUNCTION.")] = None,
    pixels: Annotated[int | None, typer.Option("--pixels", help="Height and width of its images.")] = None,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, ...; auto takes a GPU if there is one.")] = "auto",
    out: Annotated[Path, typer.Option("--out", help="Where the files go.")] = Path("runs/figures"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Measure anew, whatever is there.")] = False,
    redraw: Annotated[
        bool, typer.Option("--redraw", help="Draw the raw data that are there; measure nothing.")
    ] = False,
    list_figures: Annotated[bool, typer.Option("--list", help="List the figures and stop.")] = False,
) -> None:
    """Reproduce the paper's figures on small data sets.

    Args:
        name: A figure, or all.
        data: A recipe.
        epochs: Passes over the training set.
        eval_interval: Steps between evaluations.
        seeds: Separated by commas.
        batch_sizes: Separated by commas.
        model: The network that is split.
        pixels: Of its images.
        device: Where to measure.
        out: Where the files go.
        overwrite: Measure anew.
        redraw: Draw what is there.
        list_figures: List the figures instead.

    Raises:
        UserError: If no figure is named.
    """
    from torch_thor.bench.figures import FIGURES, Options, figure_table, make_figures, numbers

    if list_figures:
        Console().print(figure_table())
        return
    if name is None:
        raise UserError(f"name a figure ({', '.join(FIGURES)}) or all; --list says what they show")
    options = Options(
        data=data,
        epochs=epochs,
        eval_interval=eval_interval,
        seeds=numbers("--seeds", seeds),
        batch_sizes=numbers("--batch-sizes", batch_sizes),
        model=model,
        pixels=pixels,
    )
    make_figures(name, out, Console(), options, device=device, overwrite=overwrite, redraw=redraw)


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"  # of `torchrun`, which starts many processes


def _complain(line: str) -> None:
    rank = os.environ.get("RANK", "0")  # of `torchrun`, which starts many that may all have something to say
    sys.stderr.write(f"torch-thor{'' if rank == '0' else f', rank {rank}'}: {visible(line)}\n")


def main() -> None:
    """Run the command line; exits with 0, 2 (the user can put it right) or 130 (stopped by a signal).

    Raises:
        SystemExit: Always, but for
        OSError: One that says nothing of a file or a disk, which is a fault of ours.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file name that the terminal has no letters for
    try:
        app()
    except UserError as error:
        if not isinstance(error, ElsewhereError):
            _complain(str(error))
        raise SystemExit(USER_ERROR) from error
    except StoppedError as stop:
        if os.environ.get("RANK", "0") == "0":  # all processes stop at the same step
            _complain(str(stop))
        raise SystemExit(INTERRUPTED) from stop
    except _InterruptedError as stop:
        if _is_first():
            _complain(CTRL_C)
        raise SystemExit(INTERRUPTED) from stop
    except OSError as error:
        if error.filename is None and error.errno not in OUTSIDE:
            raise
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        _complain(f"{where}{error.strerror}: check the path, its permissions and its disk")
        raise SystemExit(USER_ERROR) from error


if __name__ == "__main__":
    main()
