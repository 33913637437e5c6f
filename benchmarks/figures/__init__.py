"""The paper's figures on small data, each by its name, or all.

Trains on one thread, and writes NAME.jsonl (a result in each line), NAME.png and NAME.md into
the folder. A result that is there is not measured again, so the same command continues an
interrupted measurement; other options add results. To measure anew, delete NAME.jsonl.

    python -m benchmarks figures                  # lists them
    python -m benchmarks figures curves --data digits --seeds 0,1,2
"""

from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.table import Table
from torch.distributed import is_torchelastic_launched

from benchmarks.figures import batch_sizes, bert, curves, fisher_norm, split_dim, why_curvature
from benchmarks.figures.training import Options, Row
from benchmarks.runner.golden import is_stale
from benchmarks.runner.options import Parser, whole_numbers
from benchmarks.runner.stores import Lines, key_of
from benchmarks.runner.study import complete
from torch_thor.errors import UserError, require
from torch_thor.files import write_text
from torch_thor.printing import printer
from torch_thor.training.recipe_keys import nearest

# A figure is a module with `ABOUT`, `TAKES` (its options), `jobs(options, device)`, `run(job)`,
# `optimizers(job)`, `table(rows)` and `draw(rows, path)`. All that changes a result is in its job,
# so other options are other jobs of the same file.
FIGURES: dict[str, ModuleType] = {
    "curves": curves, "fisher-norm": fisher_norm, "split-dim": split_dim,
    "batch-sizes": batch_sizes, "bert": bert, "why-curvature": why_curvature,
}  # fmt: skip
ANOTHER = "choose another folder with --out"
SHOWN = ("data", "model", "batch_size", "epochs", "steps", "batch", "pixels", "seed")
MACHINE = ("processor", "cores", "threads", "python", "torch", "torch_thor")


class Results(Lines):
    """The results of a figure, with the command that measures them."""

    def keep(self, key: str, result: Mapping[str, Any]) -> None:
        """Add a result."""
        super().keep(key, {**result, "command": f"python -m benchmarks figures {self.path.stem}"})


def main() -> None:
    """Make the figures that the words of the command name, or list all."""
    options = vars(_options())
    name, out = options.pop("name"), options.pop("out")
    device, redraw = options.pop("device"), options.pop("redraw")
    if name is None:
        Console().print(_list())
        return
    given = {key: value for key, value in options.items() if value is not None}
    make_figures(name, out, Console(), given, device=device, redraw=redraw)


def _options() -> Namespace:
    made = Parser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add = made.add_argument
    add("name", nargs="?", help="the name of a figure, or all (default: list them)")
    add("--data", help="a recipe: fashion-mnist (the default), digits, or a file")
    add("--epochs", type=int, help="passes over the training set")
    add("--eval-interval", type=int, help="steps between evaluations, at the recipe's batch")
    add("--seeds", type=whole_numbers(0), help="seeds, one training each, such as 0,1,2")
    add("--batch-sizes", type=whole_numbers(1), help="batch sizes, such as 64,128,256")
    add("--model", help="the model of split-dim: a name, or FILE.py:FUNCTION")
    add("--pixels", type=int, help="height and width of the images of split-dim")
    add("--device", default="auto", help="cpu, cuda, ... (default: the fastest there is)")
    add("--out", type=Path, default=Path("runs/figures"), help="default: %(default)s")
    add("--redraw", action="store_true", help="tables and pictures alone, of results there are")
    return made.parse_args()


def _list() -> Table:
    table = Table("figure", "shows", "options")
    for name, figure in FIGURES.items():
        table.add_row(name, figure.ABOUT, " ".join(map(_word, figure.TAKES)))
    table.add_row("all", "each of these, one after the other", "those of each")
    return table


def make_figures(
    name: str,
    out: Path,
    console: Console,
    options: Options,
    *,
    device: str = "auto",
    redraw: bool = False,
) -> None:
    """Measure what is missing of a figure, then write its table and picture."""
    known = [*FIGURES, "all"]
    require(
        name in known,
        f"there is no figure {name}{nearest(name, known)}: the figures are {', '.join(known)}",
    )
    require(
        not is_torchelastic_launched(), "figures are measured by one process: leave out torchrun"
    )
    names = list(FIGURES) if name == "all" else [name]
    for option in options:
        takers = [key for key, figure in FIGURES.items() if option in figure.TAKES]
        taken = not set(takers).isdisjoint(names)
        require(taken, f"{_word(option)} means nothing to {name}: it is for {', '.join(takers)}")
    todo = {
        each: (FIGURES[each].jobs(options, device), _store(out / f"{each}.jsonl")) for each in names
    }
    for jobs, store in todo.values():  # all are checked before the first is measured
        lacking = sum(key_of(job) not in store.rows for job in jobs)
        remedy = (
            f"lacks {lacking} of {len(jobs)} results for these options: leave out --redraw to "
            "measure them"
        )
        require(not (redraw and lacking), f"{store.path} {remedy}")
    for each, (jobs, store) in todo.items():
        _make(FIGURES[each], jobs, store, console)


def _word(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _store(path: Path) -> Lines:
    try:
        return Results(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): delete it to measure anew, or {ANOTHER}"
        ) from error


def _make(figure: ModuleType, jobs: Sequence[Row], store: Lines, console: Console) -> None:
    say, keys = printer(console), {key_of(job): job for job in jobs}

    def short(text: str) -> str:
        for key, job in keys.items():
            own = (
                f"{name} {value}" for name, value in job.items() if name not in ("recipe", "device")
            )
            text = text.replace(key, ", ".join(own))
        return text.replace("\n", " ")

    say(
        f"{store.path}: {sum(key not in store.rows for key in keys)} of {len(keys)} results to "
        "measure"
    )
    try:
        complete(
            figure.__name__, lambda _: jobs, store, workers=1, say=lambda line: say(short(line))
        )
    except UserError as error:
        raise UserError(short(str(error))) from error
    rows = [store.rows[key] for key in keys]
    text = f"{figure.table(rows)}\n\n{_origin(rows)}"
    write_text(store.path.with_suffix(".md"), text + "\n")
    figure.draw(rows, store.path.with_suffix(".png"))
    for line in text.splitlines():
        say(line)
    say(f"Results, picture and table are {store.path.with_suffix('')}.jsonl, .png and .md")


def _origin(rows: Sequence[Row]) -> str:
    """Say what was measured, on which machines, and whether their optimizers have changed since."""
    first = rows[0]["job"].get("recipe", rows[0]["job"])
    first = {**first, "data": first.get("data", {}).get("name")}
    what = ", ".join(f"{key} {first[key]}" for key in SHOWN if first.get(key) is not None)
    where = {
        f"{row['job']['device']}, " + ", ".join(f"{key} {row[key]}" for key in MACHINE)
        for row in rows
    }
    stale = sum(map(is_stale, rows))
    found = (
        f"Measured: {len(rows)} jobs, the first with {what}. Machine: {'; '.join(sorted(where))}."
    )
    if not stale:
        return found
    return f"{found} Stale: {stale} of {len(rows)}, whose optimizers take other steps by now."
