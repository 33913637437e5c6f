"""The definition of a figure: its options, its settings, the runs that these require, and its drawing functions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from torch_thor.bench.figures.raw import RawData
from torch_thor.training import Recipe, load_recipe
from torch_thor.training.errors import require

if TYPE_CHECKING:  # slow to import
    from matplotlib.figure import Figure as Picture

DEFAULT_DATA = "fashion-mnist"
WHICH_RUNS = ("seeds", "batch_sizes")  # settings that determine which runs there are, but not how a run is measured


@dataclass(frozen=True)
class Options:
    """The options of a figure; `None` stands for the default of the figure.

    Args:
        data: The recipe with data, network and tuned settings: `fashion-mnist`, `digits` or a YAML file.
        epochs: The number of passes over the training set.
        eval_interval: The number of steps between evaluations, at the recipe's batch size.
        seeds: The seeds, with one training each.
        batch_sizes: The numbers of images per step.
        model: The network whose factors are split, as for `torch-thor split-dim`.
        pixels: The height and width of its images.
    """

    data: str | None = None
    epochs: int | None = None
    eval_interval: int | None = None
    seeds: tuple[int, ...] | None = None
    batch_sizes: tuple[int, ...] | None = None
    model: str | None = None
    pixels: int | None = None

    def __post_init__(self) -> None:
        for name, numbers, least in (("seeds", self.seeds, 0), ("batch-sizes", self.batch_sizes, 1)):
            require(
                numbers is None or (min(numbers, default=-1) >= least and len(set(numbers)) == len(numbers)),
                f"--{name} {','.join(map(str, numbers or ()))}: give different whole numbers of {least} or more",
            )

    def given(self) -> list[str]:
        """Return the names of the options that the user gave."""
        return [item.name for item in fields(self) if getattr(self, item.name) is not None]


@dataclass(frozen=True)
class Figure:
    """One figure.

    Args:
        about: One line for `torch-thor figures --list`.
        takes: The names of the options that it uses.
        settings: Returns the settings for given options and a device, as JSON values.
        jobs: Returns the runs that the settings require, as JSON values that identify each.
        measure: Returns the results of one run, as JSON values.
        draw: Draws a PNG file from complete raw data.
        table: Returns tables in Markdown from complete raw data.
    """

    about: str
    takes: tuple[str, ...]
    settings: Callable[[Options, str], dict[str, Any]]
    jobs: Callable[[Mapping[str, Any]], list[dict[str, Any]]]
    measure: Callable[[Mapping[str, Any], Mapping[str, Any], Console], dict[str, Any]]
    draw: Callable[[RawData, Path], None]
    table: Callable[[RawData], str]


def recipe_of(options: Options, optimizers: Sequence[str], default: str = DEFAULT_DATA) -> Recipe:
    """Return the recipe of a figure."""
    words = [f"optimizer={','.join(optimizers)}"]
    words += [f"{key}={value}" for key in ("epochs", "eval_interval") if (value := getattr(options, key)) is not None]
    return load_recipe(options.data or default, words)


def write_title(picture: "Picture", raw: RawData, how: str, what: str = "") -> None:
    """Write a title above a picture: the data, the network, the batch size and the number of seeds."""
    recipe, seeds = raw.settings["recipe"], len(raw.settings["seeds"])
    picture.suptitle(
        f"{recipe['data']['name']}, {recipe['model']}, batch {recipe['batch_size']}, {how}; "
        f"{what}{seeds} seed{'s' if seeds > 1 else ''}",
        fontsize=10,
    )
