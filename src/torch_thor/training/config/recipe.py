"""Recipes: a YAML file with typed keys, any of which `key=value` overrides.

A recipe is a `RunConfig` with names: which task, data, network and optimizers, and tuned settings for each.
"""

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from torch_thor.training.config.data_spec import DataSpec
from torch_thor.training.config.run_config import RunConfig
from torch_thor.training.config.yaml_text import check_yaml, load_yaml, read_text
from torch_thor.training.errors import UserError, first_line, require
from torch_thor.training.models.library import nearest
from torch_thor.training.optimizers.registry import OPTIMIZERS, default_settings
from torch_thor.training.optimizers.settings import OptimizerSettings
from torch_thor.training.tasks.registry import TASKS
from torch_thor.training.tasks.task import primary

DEFAULT_RECIPE = "digits"
MOST_THREADS, MOST_CLASSES = 4096, 10_000_000
# What a resumed run may change: where data lie and how they are read, when a run ends, what is written and when. A key
# with a dot at its end means all inside. None of them changes what a step computes; `lengthening` checks the epochs,
# and weights are known by their checksum.
FREE_ON_RESUME = (
    "about", "reaches", "epochs", "weights",
    "data.root", "data.download", "data.workers.", "data.max_broken", "data.cache",
    "targets", "stop_at", "checkpoint_interval", "keep_checkpoints", "keep_best", "log_interval",
)  # fmt: skip
WHOLE_SETTINGS = {"update_interval", "trace_thresholds", "decay_filter"}  # THOR's, which are of more than one type


@dataclass(frozen=True)
class Recipe(RunConfig):
    """A training from beginning to end; the keys of a recipe file.

    Args:
        name: The recipe's name: its file's, without `.yaml`.
        about: One line for `torch-thor train --list`.
        reaches: What it should reach, and from where that is known; printed beside it.
        task: What is trained: image-classification, autoencoder or char-lm.
        data: The data set.
        model: The network: of image-classification small-cnn, small-resnet, cifar-resnet18, or an image classifier of
            torchvision's or timm's (`torchvision:NAME`, `timm:NAME`, or bare); of autoencoder deep-autoencoder; of
            char-lm char-transformer. Its weights are random.
        weights: What the network starts from in the place of random weights: a safetensors file, or what `torch-thor
            eval` takes (a checkpoint, a folder of checkpoints such as `best`, a run folder with one optimizer); `None`
            is random weights.
        weights_except: Weights that start at random all the same, by name or pattern: `[head]`.
        weights_sha256: The checksum of the file, which a run writes down; where it is given it must be right.
        classes: Outputs of the network, at least the classes of the data; `None` is that number. (The reference
            ResNet-50 has 1001 for ImageNet's 1000.)
        optimizer: The optimizers to train with, one after the other.
        optimizers: Settings of every optimizer, whether it is trained with or not.
        targets: Values of the task's primary metric (top-1 accuracies, in (0, 1], of a classifier) that the final table
            counts steps and seconds to.
        checkpoint_interval: Steps between checkpoints; `None` is one epoch. The last step is always saved.
        keep_checkpoints: Newest checkpoints to keep.
        keep_best: Whether to keep the checkpoint of the best evaluation too, in `best/`.
        log_interval: Steps between the lines that are printed where there is no terminal, and at most between points in
            TensorBoard; `None` prints a line for each evaluation only.
        threads: CPU threads; `None` leaves torch's choice. A tiny network is fastest with one, above all where other
            programs want the cores too; and a resumed run is the same bit for bit only with the same number.
        written: No key of a recipe: what was written in the place of a value that OmegaConf has resolved, by key
            (`{"data.root": "${oc.env:DATA}"}`). A file keeps this text and not the value, which may be a secret.
    """

    name: str = "unnamed"
    about: str = ""
    reaches: str = ""
    task: str = "image-classification"
    data: DataSpec = field(default_factory=DataSpec)
    model: str = "small-cnn"
    weights: str | None = None
    weights_except: tuple[str, ...] = ()
    weights_sha256: str | None = None
    classes: int | None = None
    optimizer: tuple[str, ...] = ("thor", "sgd")
    optimizers: dict[str, OptimizerSettings] = field(default_factory=default_settings)
    targets: tuple[float, ...] = ()
    checkpoint_interval: int | None = None
    keep_checkpoints: int = 2
    keep_best: bool = True
    log_interval: int | None = 100
    threads: int | None = None
    written: dict[str, Any] = field(
        default_factory=dict, compare=False, repr=False, metadata={"omegaconf_ignore": True}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.task in TASKS, f"task={self.task} is no task: use one of {', '.join(TASKS)}")
        metric = primary(TASKS[self.task].METRICS)
        if self.stop_at is not None:
            metric.check_target("stop_at", self.stop_at)
        require(
            self.threads is None or 1 <= self.threads <= MOST_THREADS,
            f"threads={self.threads} must lie in [1, {MOST_THREADS}]; null leaves torch's choice",
        )
        require(
            self.classes is None or 1 <= self.classes <= MOST_CLASSES,
            f"classes={self.classes} must lie in [1, {MOST_CLASSES}]; null is the number of the data's",
        )
        TASKS[self.task].check(self)
        require(
            self.weights is not None or (self.weights_sha256 is None and not self.weights_except),
            f"weights is not set, and weights_except={list(self.weights_except)} or "
            f"weights_sha256={self.weights_sha256} is: give weights=FILE, or leave them out",
        )
        require(len(self.optimizer) >= 1, f"optimizer is empty: name one or more of {', '.join(OPTIMIZERS)}")
        for name in (*self.optimizer, *self.optimizers):
            require(name in OPTIMIZERS, f"optimizer={name} is no optimizer: use one of {', '.join(OPTIMIZERS)}")
        require(
            len(set(self.optimizer)) == len(self.optimizer),
            f"optimizer={','.join(self.optimizer)} names one twice: name each once",
        )
        for target in self.targets:
            metric.check_target("targets", target, list(self.targets))
        require(
            self.checkpoint_interval is None or self.checkpoint_interval >= 1,
            f"checkpoint_interval={self.checkpoint_interval} must be 1 or more steps; null is one epoch",
        )
        require(
            self.keep_checkpoints >= 1,
            f"keep_checkpoints={self.keep_checkpoints} must be 1 or more; 2 keeps one to fall back on",
        )
        require(
            self.log_interval is None or self.log_interval >= 1,
            f"log_interval={self.log_interval} must be 1 or more steps; null prints evaluations only",
        )


def recipe_folder() -> Traversable:
    """Where the recipes lie: inside an installed package, or at the top of a source tree.

    Returns:
        The folder.

    Raises:
        UserError: If neither is there.
    """
    installed = files("torch_thor") / "recipes"
    if installed.is_dir():
        return installed
    source = Path(__file__).parents[4] / "recipes"
    if source.is_dir():
        return source
    raise UserError(f"no recipes in {installed} or {source}: install torch-thor again")


def recipe_names() -> list[str]:
    """The recipes there are.

    Returns:
        Their names, sorted.
    """
    return sorted(item.name.removesuffix(".yaml") for item in recipe_folder().iterdir() if item.name.endswith(".yaml"))


def recipe_list() -> list[tuple[str, str, str]]:
    """What the recipes say of themselves.

    Read as plain YAML: what a recipe needs (timm for its network, say) need not be installed to list it.

    Returns:
        Name, `about` and `reaches` of each.
    """
    folder = recipe_folder()
    contents = {name: yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8")) for name in recipe_names()}
    return [(name, str(content["about"]), str(content["reaches"])) for name, content in contents.items()]


def load_recipe(name: str, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe by name and apply overrides.

    Args:
        name: A recipe's name, or the path of a YAML file.
        overrides: `key=value` words; a key is a recipe's (dots go inside: `schedule.kind`), or a setting of
            the chosen optimizers (`lr`, `damping`, ...).

    Returns:
        The checked recipe.
    """
    text, own = _text_of(name)
    return parse_recipe(text, own, overrides or [])


def name_of(name: str) -> str:
    """The name that a recipe would have, which `name:` in its file may set; nothing else in it is looked at.

    Args:
        name: As for `load_recipe`.

    Returns:
        The name.
    """
    text, own = _text_of(name)
    content = load_yaml(text, f"recipe {own}")
    return str(content.get("name", own)) if isinstance(content, dict) else own


def _text_of(name: str) -> tuple[str, str]:
    # of a recipe, with the name that it has where the text has none
    path = Path(name)
    if path.suffix in {".yaml", ".yml"}:
        require(
            path.is_file(),
            f"{path} is not a file: name a recipe ({', '.join(recipe_names())}) or a YAML file",
        )
        return read_text(path), path.stem
    names = recipe_names()
    require(name in names, f"there is no recipe {name}{nearest(name, names)}: the recipes are {', '.join(names)}")
    return (recipe_folder() / f"{name}.yaml").read_text(encoding="utf-8"), name


def parse_recipe(text: str, name: str, overrides: list[str]) -> Recipe:
    """Turn YAML and overrides into a recipe.

    Args:
        text: The YAML.
        name: The recipe's name where the YAML has none.
        overrides: `key=value` words, as for `load_recipe`.

    Returns:
        The checked recipe.
    """
    content = load_yaml(text, f"recipe {name}")
    require(isinstance(content, dict), f"recipe {name} holds no keys: write it as `key: value` lines")
    config = _merged(OmegaConf.structured(Recipe), {"name": name, **content})
    pairs = [_split(word) for word in overrides]
    for key, value in pairs:
        if key == "optimizer":
            config = _merged(config, {key: value.split(",") if isinstance(value, str) else value})
    for key, value in pairs:
        if key != "optimizer":
            config = _merged(config, _spread(config, key, value))
    return _to_recipe(config)


def _to_recipe(config: DictConfig) -> Recipe:
    try:
        recipe = cast(Recipe, OmegaConf.to_object(config))
        texts = _flat(OmegaConf.to_container(config))
        return replace(recipe, written={key: text for key, text in texts.items() if _interpolates(text)})
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {first_line(error)}") from error


def override(recipe: Recipe, overrides: list[str]) -> Recipe:
    """Apply overrides to a recipe that is already there.

    Args:
        recipe: The recipe.
        overrides: `key=value` words, as for `load_recipe`.

    Returns:
        A new, checked recipe.
    """
    return parse_recipe(recipe_yaml(recipe), recipe.name, overrides)


def recipe_yaml(recipe: Recipe) -> str:
    """A recipe as YAML, every key written out.

    Args:
        recipe: The recipe.

    Returns:
        Text that `parse_recipe` turns into an equal recipe.
    """
    written = recipe.written
    if written:
        with suppress(UserError):  # a variable is gone: then no text can be compared with its value
            again = flat_values(_to_recipe(_merged(OmegaConf.structured(Recipe), _with(recipe, written))))
            values = flat_values(recipe)
            replaced = {key for key in values if values[key] != again.get(key)}  # by `dataclasses.replace`
            written = {key: text for key, text in written.items() if not any(_inside(one, key) for one in replaced)}
    return OmegaConf.to_yaml(OmegaConf.create(_with(recipe, written)))


def _with(recipe: Recipe, written: Mapping[str, Any]) -> dict[str, Any]:
    container = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.structured(recipe)))
    for key, text in written.items():
        node = container
        *above, last = key.split(".")
        for part in above:
            node = node[part]
        node[last] = text
    return container


def differences(old: Recipe, new: Recipe, but: Sequence[str] = ()) -> list[str]:
    """The keys in which two recipes differ.

    Args:
        old: One recipe.
        new: Another.
        but: Keys to pass over; with a dot at the end, all that are inside.

    Returns:
        `key: old -> new` for each, with the text in the place of a resolved value; empty if they are equal.
    """
    flat_old, flat_new = flat_values(old), flat_values(new)
    keys = [key for key in {**flat_old, **flat_new} if flat_old.get(key) != flat_new.get(key) and not covers(but, key)]
    return [f"{key}: {_shown(old, key, flat_old)} -> {_shown(new, key, flat_new)}" for key in keys]


def flat_values(recipe: Recipe) -> dict[str, Any]:
    """The values of a recipe, resolved.

    Args:
        recipe: The recipe.

    Returns:
        Each by its key, with dots inside.
    """
    return _flat(OmegaConf.to_container(OmegaConf.structured(recipe)))


def covers(keys: Sequence[str], key: str) -> bool:
    """Whether a list of keys names one.

    Args:
        keys: Keys; one with a dot at its end means all inside.
        key: A key.

    Returns:
        True if it is in the list.
    """
    return any(key == one or (one.endswith(".") and key.startswith(one)) for one in keys)


def _shown(recipe: Recipe, key: str, values: Mapping[str, Any]) -> Any:
    return next((text for own, text in recipe.written.items() if _inside(key, own)), values.get(key))


def _inside(key: str, other: str) -> bool:
    return f"{key}.".startswith(f"{other}.")


def _interpolates(value: Any) -> bool:
    if isinstance(value, dict | list | tuple):
        return any(_interpolates(part) for part in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and "${" in value


def _split(word: str) -> tuple[str, Any]:
    key, equals, value = word.partition("=")
    require(bool(key) and bool(equals), f"'{word}' is no override: write key=value, for example lr=0.1")
    check_yaml(value, f"{word}: the value")
    try:
        return key, OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))["value"]  # type: ignore[index, call-overload]
    except (yaml.YAMLError, ValueError, OmegaConfBaseException) as error:
        raise UserError(
            f"{word}: the value is not YAML; quote it if it begins with * or holds brackets or colons"
        ) from error


def _spread(config: DictConfig, key: str, value: Any) -> dict[str, Any]:
    # a recipe's key, or that setting of every chosen optimizer which has it
    if key.split(".")[0] in config:
        return _nested(key, value)
    chosen = [name for name in config.optimizer if name in OPTIMIZERS]
    setting = key.split(".")[0]
    takers = [name for name in chosen if setting in {item.name for item in fields(OPTIMIZERS[name].settings)}]
    known = [
        *_flat(OmegaConf.to_container(config)),
        *(item for name in chosen for item in config.optimizers[name]),
    ]
    require(
        bool(takers),
        f"there is no key {key}{nearest(key, known)}: see the recipe's keys in `torch-thor train --list`",
    )
    return {"optimizers": {name: _nested(key, value) for name in takers}}


def _nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return cast(dict[str, Any], value)


def _merged(config: DictConfig, change: dict[str, Any]) -> DictConfig:
    unknown = [name for name in _settings_in(change) if name not in OPTIMIZERS]
    require(
        not unknown, f"optimizers.{', '.join(map(str, unknown))}: no such optimizer; use one of {', '.join(OPTIMIZERS)}"
    )
    try:
        return cast(DictConfig, OmegaConf.merge(_without_replaced(config, change), OmegaConf.create(change)))
    except (ConfigKeyError, ConfigAttributeError) as error:
        known = list(_flat(OmegaConf.to_container(config)))
        raise UserError(f"there is no key {error.full_key}{nearest(str(error.full_key), known)}") from error
    except TypeError as error:  # what OmegaConf says of a mapping in the place of a list
        raise UserError(f"{next(iter(_flat(change)))}: {error}") from error
    except OmegaConfBaseException as error:
        key = error.full_key or next(iter(_flat(change)))
        raise UserError(f"{key}: {first_line(error)}") from error


def _settings_in(change: dict[str, Any]) -> dict[str, Any]:
    settings = change.get("optimizers")
    return settings if isinstance(settings, dict) else {}


def _without_replaced(config: DictConfig, change: dict[str, Any]) -> DictConfig:
    # OmegaConf merges a mapping into a mapping and takes no word for a list. A setting that may be either, and a
    # mapping that says its kind, are given as a whole: what stood there goes.
    config = copy.deepcopy(config)
    for name, settings in _settings_in(change).items():
        for key, value in settings.items() if isinstance(settings, dict) else ():
            if (
                key in WHOLE_SETTINGS
                and key in config.optimizers[name]
                and (not isinstance(value, dict) or "kind" in value)
            ):
                own = config.optimizers[name]
                with read_write(own), open_dict(own):
                    own.pop(key)  # only a new node may be of another type
                    own[key] = None
    return config


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix.removesuffix("."): tree}
    return {key: value for name, branch in tree.items() for key, value in _flat(branch, f"{prefix}{name}.").items()}
