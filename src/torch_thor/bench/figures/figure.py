"""The definition of a figure: its settings, the runs that these require, and how it is drawn from raw data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from torch_thor.bench.figures.raw import RawData
from torch_thor.training.config.recipe import Recipe
from torch_thor.training.config.recipe_files import load_recipe
from torch_thor.training.engine.parallel import resolve_device
from torch_thor.training.errors import UserError, require

if TYPE_CHECKING:  # slow to import, and no window is wanted
    from matplotlib.figure import Figure as Picture

DEFAULT_DATA = "fashion-mnist"
WHICH_RUNS = ("seeds", "batch_sizes")  # settings that say which runs there are, and not how one is measured


@dataclass(frozen=True)
class Options:
    """The options of a figure; `None` is the figure's own choice.

    Args:
        data: The recipe with data, network and tuned settings: `fashion-mnist`, `digits` or a YAML file.
        epochs: Passes over the training set.
        eval_interval: Steps between evaluations, at the recipe's batch size.
        seeds: One training each.
        batch_sizes: Images a step.
        model: The network whose factors are split, as `torch-thor split-dim` takes it.
        pixels: Height and width of its images.
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
        """Return the options that the user gave.

        Returns:
            Their names.
        """
        return [item.name for item in fields(self) if getattr(self, item.name) is not None]


@dataclass(frozen=True)
class Figure:
    """One figure.

    Args:
        about: One line for `torch-thor figures --list`.
        takes: The options that mean something to it.
        settings: From options and device to what decides the measurement, in plain values.
        jobs: From settings to the runs: which ones there are, in plain values.
        measure: From settings and one job to that run's numbers, in plain values.
        draw: From complete raw data to a PNG.
        table: From complete raw data to Markdown.
    """

    about: str
    takes: tuple[str, ...]
    settings: Callable[[Options, str], dict[str, Any]]
    jobs: Callable[[Mapping[str, Any]], list[dict[str, Any]]]
    measure: Callable[[Mapping[str, Any], Mapping[str, Any], Console], dict[str, Any]]
    draw: Callable[[RawData, Path], None]
    table: Callable[[RawData], str]


def numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    """Read whole numbers from an option.

    Args:
        option: As the user writes it.
        text: Numbers separated by commas; `None` where the option was not given.

    Returns:
        The numbers.

    Raises:
        UserError: If it is something else.
    """
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UserError(f"{option} {text}: give whole numbers separated by commas, such as 1,2,4") from error


def recipe_of(options: Options, default: str = DEFAULT_DATA) -> Recipe:
    """Return the recipe that a figure starts from.

    Args:
        options: The user's.
        default: The recipe where these name none.

    Returns:
        The recipe, with epochs and evaluations as the user wants them.
    """
    words = [f"{key}={value}" for key in ("epochs", "eval_interval") if (value := getattr(options, key)) is not None]
    return load_recipe(options.data or default, words)


def device_of(name: str) -> str:
    """Name the device for the settings.

    Args:
        name: As a recipe has it.

    Returns:
        A device name; never `auto`.
    """
    return str(resolve_device(name))


def write_title(picture: "Picture", raw: RawData, how: str, what: str = "") -> None:
    """Write above a picture what was trained, how, and with how many seeds.

    Args:
        picture: The picture.
        raw: The raw data that it shows.
        how: Stands after network and batch size.
        what: Stands before the number of seeds.
    """
    recipe, seeds = raw.settings["recipe"], len(raw.settings["seeds"])
    picture.suptitle(
        f"{recipe['data']['name']}, {recipe['model']}, batch {recipe['batch_size']}, {how}; "
        f"{what}{seeds} seed{'s' if seeds > 1 else ''}",
        fontsize=10,
    )
