"""Checkpoints: saving and loading them, keeping the best, and weights to start from.

They have one format for one process, DDP, FSDP2 and HSDP, and any number of processes loads any of
them. A checkpoint is a folder `step-00000123`, which is complete or absent, with

    model.safetensors      the weights, whole and by name; of a weight with several names, the first
    averaged.safetensors   the averaged weights, if the run has any
    state.pt               states: of the optimizer by name, the loss scale, random generators
    recipe.yaml            the recipe of the run
    manifest.json          the fields of `Checkpoint`, and SHA-256 of each file above

Nothing in it is executed. The symbolic link `best` leads to the checkpoint of the best evaluation.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.tensor import distribute_tensor

from torch_thor.capture.patterns import matches
from torch_thor.capture.sharding import is_sharded
from torch_thor.errors import StoppedError, UserError, first_line, require
from torch_thor.files import REMAINS, sha256, whole_folder
from torch_thor.training.loop import Observer, Run, Score
from torch_thor.training.recipe_model import Recipe
from torch_thor.training.recipes import load_recipe, to_yaml
from torch_thor.training.tasks.task import Task

WEIGHTS, AVERAGED, STATE = "model.safetensors", "averaged.safetensors", "state.pt"
BEST, CHECKPOINTS, RECIPE, MANIFEST = "best", "checkpoints", "recipe.yaml", "manifest.json"
# Only exact names are ours: a user may keep copies beside them.
_NAME = re.compile(r"step-\d{8}")


def name_of(step: int) -> str:
    """Return the name of the checkpoint after a step."""
    return f"step-{step:08d}"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose checksums matched when it was opened."""

    path: Path
    recipe: Recipe
    step: int
    optimizer: str
    data: Mapping[str, Any]  # what identifies the training data, see `Task.data`
    offset: int  # the length in bytes of the run's `metrics.jsonl` at the step

    @property
    def kinds(self) -> tuple[bool, ...]:
        """False for the weights, and True for averaged weights if it has any."""
        return (False, True) if (self.path / AVERAGED).exists() else (False,)

    def weights(self, averaged: bool = False) -> dict[str, Tensor]:
        """Read the weights, or the averaged weights, by name."""
        return load_file(self.path / (AVERAGED if averaged else WEIGHTS))

    def restore(self, run: Run, say: Callable[[str], None] = lambda _: None) -> None:
        """Load it into a run before its first step, bit for bit as if it had not stopped.

        Every process calls it. With other numbers of processes or threads, or on another machine,
        only the batches are the same.
        """
        data = json.loads(json.dumps(run.task.data))
        changed = [key for key in self.data if data.get(key) != self.data[key]]
        require(
            not changed,
            f"{self.path} began with other data ({' and '.join(changed)}): give those as "
            "data.root=FOLDER, or start another run with --out",
        )
        state: dict[str, Any] = torch.load(self.path / STATE, map_location="cpu", weights_only=True)
        # of a divided network it tells which tensors are divided; torch takes a step for it
        divided: Any = (
            get_optimizer_state_dict(run.model, run.optimizer)["state"]
            if any(map(is_sharded, run.model.parameters()))
            else {}
        )
        load_weights(run.model, self.weights(), str(self.path))
        _load_optimizer(run, state["optimizer"], divided)
        run.precision.scaler.load_state_dict(state["precision"])
        if run.average is not None:
            load_weights(run.average.module, self.weights(True), str(self.path))
            run.average.n_averaged.fill_(state["averaged_steps"])
        run.step, run.seconds = self.step, state["seconds"]
        run.score, run.best = (each and Score(**each) for each in (state["score"], state["best"]))
        if len(state["random"]) != run.ranks.world:
            say(f"saved by {len(state['random'])} processes: dropout has other random numbers")
            return
        random = state["random"][run.ranks.rank]
        torch.set_rng_state(random["cpu"])
        if run.ranks.device.type == "cuda" and random["cuda"] is not None:
            torch.cuda.set_rng_state(random["cuda"], run.ranks.device)


def load_weights(model: nn.Module, given: Mapping[str, Tensor], source: str) -> None:
    """Load weights by name into a network, which may be divided; `source` is for the message."""
    weights = by_first_name(model, model.state_dict())
    found, expected = (
        {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for tensors in (given, weights)
    )
    faults = [
        f"{name}: {found.get(name)}, the network has {expected.get(name)}"
        for name in sorted(found.keys() | expected.keys())
        if found.get(name) != expected.get(name)
    ]
    require(
        not faults,
        f"{source} does not contain the weights of this network: {len(faults)} differ "
        f"({'; '.join(faults[:3])})",
    )
    with torch.no_grad():
        for name, tensor in weights.items():
            tensor.copy_(_like(given[name], tensor))


def by_first_name(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name the tensors of a network by the first of the names that each has in it."""
    first: dict[int, str] = {}
    every = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    names = {name: first.setdefault(id(tensor), name) for name, tensor in every}
    return {names.get(name, name): tensor for name, tensor in tensors.items()}


def _like(full: Any, target: Any) -> Any:
    """Return a full tensor cut like `target`: the rows of this process, where it has only some."""
    if not (is_sharded(target) and isinstance(full, Tensor) and full.shape == target.shape):
        return full
    return distribute_tensor(
        full.to(target.device), target.device_mesh, target.placements, src_data_rank=None
    )


def _load_optimizer(run: Run, saved: dict[str, Any], divided: dict[str, Any]) -> None:
    names = {parameter: name for name, parameter in run.model.named_parameters()}
    trained = (names[p] for group in run.optimizer.param_groups for p in group["params"])
    number = {name: index for index, name in enumerate(trained)}
    state = {
        number[name]: {
            key: _like(value, divided.get(name, {}).get(key)) for key, value in values.items()
        }
        for name, values in saved["state"].items()
    }
    groups = [
        {**group, "params": [number[name] for name in group["params"]]}
        for group in saved["param_groups"]
    ]
    run.optimizer.load_state_dict({"state": state, "param_groups": groups})


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint, whose files are compared with their checksums."""
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    for name, checksum in manifest.pop("sha256").items():
        require(sha256(path / name) == checksum, f"{name} does not match its checksum")
    return Checkpoint(path, load_recipe(str(path / RECIPE)), **manifest)


def newest(folder: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """Return a folder's newest undamaged checkpoint, None without any; say which are damaged."""
    for path in newest_first(folder):
        try:
            return open_checkpoint(path)
        except (OSError, ValueError, LookupError, TypeError) as error:
            if not path.exists():  # the training that goes on has removed it
                return newest(folder, say)
            say(f"checkpoint {path} is damaged ({first_line(error)}): an older checkpoint is used")
    require(
        not newest_first(folder),
        f"every checkpoint in {folder} is damaged: start again with --overwrite or --out",
    )
    return None


def newest_first(folder: Path) -> list[Path]:
    """Return the folders of checkpoints in a folder, damaged or not."""
    return sorted(
        (path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), reverse=True
    )


def find_checkpoints(path: Path, say: Callable[[str], None]) -> list[Checkpoint]:
    """Open a path's checkpoint, or each optimizer's newest undamaged checkpoint in a run folder."""
    if (path / MANIFEST).exists():
        return [open_checkpoint(path)]
    names = load_recipe(str(path / RECIPE)).optimizer if (path / RECIPE).exists() else ()
    folders = [path, path / CHECKPOINTS, *(path / name / CHECKPOINTS for name in names)]
    found = [saved for folder in folders if (saved := newest(folder, say)) is not None]
    require(
        bool(found),
        f"{path} contains no checkpoint: give a run folder, a checkpoint or a folder of them",
    )
    return found


def the_checkpoint(path: Path, say: Callable[[str], None]) -> Checkpoint:
    """Open the only checkpoint that a path stands for; a run with several optimizers is refused."""
    found = find_checkpoints(path, say)
    names = [saved.optimizer for saved in found]
    require(
        len(found) == 1,
        f"{path} holds the networks of {', '.join(names)}: give one, such as {path / names[0]}",
    )
    return found[0]


def load_initial_weights(model: nn.Module, recipe: Recipe, task: Task) -> None:
    """Load a recipe's `weights`, but for `weights_except`, into its network of random weights."""
    word, path = f"weights={recipe.weights}", Path(str(recipe.weights))
    if path.is_dir():
        saved = the_checkpoint(path, lambda _: None)
        path = saved.path / WEIGHTS
        require(
            saved.data.get("tokenizer") in (None, task.data.get("tokenizer"))
            or recipe.weights_except != (),
            f"{word} was trained with another tokenizer: prepare the corpus with its "
            "tokenizer.json, or leave the embeddings out with weights_except",
        )
    require(
        recipe.weights_sha256 in (None, sha256(path)),
        f"{word} does not have the checksum weights_sha256={recipe.weights_sha256}",
    )
    try:
        given = by_first_name(model, load_file(path))
    except SafetensorError as error:
        raise UserError(f"{word} is no file of safetensors.torch.save_file ({error})") from error
    weights = by_first_name(model, model.state_dict())
    random = {name for name in weights if name.endswith("num_batches_tracked")}
    for pattern in recipe.weights_except:
        matched = {name for name in (*weights, *given) if matches(pattern, name)}
        require(bool(matched), f"weights_except={pattern} matches no weight: correct the name")
        given = {name: tensor for name, tensor in given.items() if name not in matched}
        random |= matched & weights.keys()
    load_weights(model, {name: weights[name] for name in random} | given, word)


class Saver(Observer):
    """Saves at intervals, at the end, after the best evaluation, and before a signal's stop.

    `offset` flushes `metrics.jsonl` and returns its length; the first process calls it.
    """

    def __init__(self, folder: Path, offset: Callable[[], int]) -> None:
        self.folder, self.offset = folder, offset

    def end_of_step(self, run: Run) -> None:
        """Save if it is time, and stop after a signal, with a `StoppedError`."""
        stops = run.stopping and (run.unevaluated or not run.done)
        interval = run.recipe.checkpoint_interval or run.task.steps_per_epoch
        is_best = run.recipe.keep_best and run.best is not None and run.best.step == run.step
        if run.recipe.keep_checkpoints and (
            stops or run.done or is_best or run.step % interval == 0
        ):
            save(self.folder, run, self.offset() if run.ranks.first else 0)
        if stops:
            raise StoppedError(run.step)


def save(folder: Path, run: Run, offset: int) -> None:
    """Write a checkpoint and remove old ones; all processes call this, and the first writes."""
    weights, state = consolidated(run)
    if not run.ranks.first:
        return
    path = folder / name_of(run.step)
    try:
        with whole_folder(path) as temporary:
            torch.save(state, temporary / STATE)
            for name, tensors in weights.items():
                save_file(tensors, temporary / name)
                (temporary / name).chmod(0o644)  # safetensors lets nobody but the owner read
            (temporary / RECIPE).write_text(to_yaml(run.recipe), encoding="utf-8")
            about = {
                "step": run.step,
                "optimizer": run.name,
                "data": run.task.data,
                "offset": offset,
                "sha256": {file.name: sha256(file) for file in sorted(temporary.iterdir())},
            }
            (temporary / MANIFEST).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    except (OSError, RuntimeError, SafetensorError) as error:  # each library's for a full disk
        raise UserError(
            f"{path} cannot be written ({first_line(error)}): make room, then go on with --resume"
        ) from error
    settle(folder, run)


def settle(folder: Path, run: Run) -> None:
    """Link the best checkpoint, and remove all but it and the newest."""
    best = name_of(run.best.step) if run.best is not None and run.recipe.keep_best else ""
    if best:
        link = folder / f"{REMAINS}{BEST}"
        link.unlink(missing_ok=True)
        link.symlink_to(best)
        link.replace(folder / BEST)
    # a damaged checkpoint of a later step will be replaced
    written = [path for path in newest_first(folder) if path.name <= name_of(run.step)]
    for path in written[run.recipe.keep_checkpoints :]:
        if path.name != best:  # renamed first, so that no half of it looks like a checkpoint
            path.rename(folder / f"{REMAINS}{path.name}")
    for path in folder.glob(f"{REMAINS}step-*"):
        shutil.rmtree(path)


def consolidated(run: Run) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Return the weights by file, and everything else, whole on the first process; all call it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    models = {WEIGHTS: run.model} | ({AVERAGED: run.average.module} if run.average else {})
    weights = {}
    for file, model in models.items():
        tensors: dict[str, Any] = get_model_state_dict(model, options=options)
        named = by_first_name(model, tensors)
        weights[file] = {name: value.contiguous() for name, value in named.items()}
    cuda = torch.cuda.get_rng_state(run.ranks.device) if run.ranks.device.type == "cuda" else None
    state = {
        "optimizer": get_optimizer_state_dict(run.model, run.optimizer, options=options),
        "precision": run.precision.scaler.state_dict(),
        "averaged_steps": 0 if run.average is None else int(run.average.n_averaged),
        "seconds": run.seconds,
        "score": run.score and asdict(run.score),
        "best": run.best and asdict(run.best),
        "random": run.ranks.gathered({"cpu": torch.get_rng_state(), "cuda": cuda}),
    }
    return weights, state
