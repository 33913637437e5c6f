"""Checkpoints, in one format for one process, DDP, FSDP2 and HSDP.

Any number of processes loads any of them.

A checkpoint is a folder `step-00000123`, which is complete or absent, with

    model.safetensors      the weights, whole and by name; of a weight with several names, the first
    averaged.safetensors   the averaged weights, if the run has any
    state.pt               the state of the optimizer by parameter name, of the loss scale and of
                           random generators
    recipe.yaml            the recipe of the run
    manifest.json          step, optimizer, tokenizer, checksums of the data, length of
                           `metrics.jsonl`, and SHA-256 of each file above

Nothing in it is executed. It is written under a temporary name, flushed to the disk and renamed;
opening it verifies the checksums. Beside the newest ones that of the best evaluation is kept, to
which the symbolic link `best` leads.
"""

import hashlib
import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from torch_thor.capture.sharding import is_sharded
from torch_thor.errors import explaining, first_line, require
from torch_thor.files import sha256
from torch_thor.training.errors import DamagedCheckpointError
from torch_thor.training.loop import Run, Score
from torch_thor.training.parallel import agreed
from torch_thor.training.recipe_model import Recipe
from torch_thor.training.recipes import load_recipe
from torch_thor.training.tasks.task import Task

BEST, PREFIX = "best", "step-"
WEIGHTS, AVERAGED, STATE = "model.safetensors", "averaged.safetensors", "state.pt"
RECIPE, MANIFEST, CHECKSUM = "recipe.yaml", "manifest.json", "checksum"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose checksums matched when it was opened."""

    path: Path
    step: int
    optimizer: str
    tokenizer: str | None  # the SHA-256 of that of the training data, if they have one
    data: Mapping[str, str]  # the checksums of training data and other files, where a task has any
    offset: int  # the length in bytes of the run's `metrics.jsonl` at the step

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run."""
        return load_recipe(str(self.path / RECIPE))

    @property
    def has_average(self) -> bool:
        """Whether it contains averaged weights."""
        return (self.path / AVERAGED).exists()

    def load_weights(self, model: nn.Module, *, averaged: bool = False) -> None:
        """Load the weights, or the averaged ones, into a network, which may be divided.

        It does not communicate.
        """
        weights = by_first_name(model, model.state_dict())
        given = load_file(self.path / (AVERAGED if averaged else WEIGHTS))
        faults = misfits(given, weights)
        require(not faults, f"{self.path} does not contain the weights of this network ({faults})")
        with torch.no_grad():
            for name, tensor in weights.items():
                tensor.copy_(_like(given[name], tensor))

    def check_tokenizer(self, task: Task) -> None:
        """Refuse a task whose data another tokenizer encoded: its numbers are other word pieces."""
        checksum = getattr(task, "tokenizer_checksum", None)
        require(
            checksum is None or self.tokenizer in (None, checksum),
            f"{getattr(task, 'tokenizer_file', None)} is not the tokenizer that {self.path} was "
            f"trained with (SHA-256 {str(checksum)[:12]}, not {str(self.tokenizer)[:12]}): the "
            "corpus was prepared again or is another one; use the corpus of the training, or "
            "prepare one with --tokenizer and its tokenizer.json",
        )

    def other_data(self, task: Task) -> list[str]:
        """Name the parts of a task's data that are not those of the run."""
        checksums = getattr(task, "data_checksums", {})
        return [
            part for part in self.data if checksums.get(part, self.data[part]) != self.data[part]
        ]

    def restore(self, run: Run, say: Callable[[str], None] = lambda _: None) -> None:
        """Load it into a run before its first step, bit for bit as if it had not stopped.

        Every process calls it. With another number of processes or threads, or on another machine,
        only the batches are the same.
        """
        with agreed(run.ranks):
            require(
                self.optimizer == run.name,
                f"checkpoint {self.path} belongs to optimizer {self.optimizer}, not {run.name}: "
                "move it to the folder of its optimizer",
            )
            with explaining(
                (pickle.UnpicklingError, RuntimeError, EOFError),
                lambda error: f"{self.path / STATE} cannot be loaded ({first_line(error)})",
                DamagedCheckpointError,
            ):
                state: dict[str, Any] = torch.load(
                    self.path / STATE, map_location="cpu", weights_only=True
                )
            self.check_tokenizer(run.task)
            changed = self.other_data(run.task)
            require(
                not changed,
                f"the {' and the '.join(changed)} are not those that the run of {self.path} began "
                "with: files were added, removed, renamed or changed, or data.root is another "
                "folder; restore them, give their folder as data.root=FOLDER, or start another run "
                "with --out",
            )
            require(
                state["samples"] == run.task.samples,
                f"the run of {self.path} began with {state['samples']} training samples, and the "
                f"data have {run.task.samples} now: give the data of the training",
            )
            self.load_weights(run.model)
        _load_optimizer(run, state["optimizer"], self.path)
        self.load_weights(run.model)  # once more: for a divided network torch has taken a step
        run.precision.scaler.load_state_dict(state["precision"])
        if run.average is not None:
            with agreed(run.ranks):
                self.load_weights(run.average.module, averaged=True)
            run.average.n_averaged.fill_(state["averaged_steps"])
        run.step, run.seconds = self.step, state["seconds"]
        run.score, run.best = (
            score and Score(**score) for score in (state["score"], state["best"])
        )
        if len(state["random"]) != run.ranks.world:
            say(
                f"the checkpoint was saved by {len(state['random'])} processes, and this run has "
                f"{run.ranks.world}: it continues with the same batches, but with other random "
                "numbers in layers such as dropout"
            )
            return
        random = state["random"][run.ranks.rank]
        torch.set_rng_state(random["cpu"])
        if run.ranks.device.type == "cuda" and random["cuda"] is not None:
            torch.cuda.set_rng_state(random["cuda"], run.ranks.device)


def by_first_name(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name the tensors of a network by the first of the names that each has in it."""
    first: dict[int, str] = {}
    names = {
        name: first.setdefault(id(tensor), name)
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
    }
    return {names.get(name, name): tensor for name, tensor in tensors.items()}


def misfits(given: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """Name the given tensors that are not those of a network; empty if all are."""
    have, need = (
        {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for tensors in (given, expected)
    )
    faults = [
        f"{name}: {have.get(name, 'missing')}, the network has {need.get(name, 'none')}"
        for name in sorted(have.keys() | need.keys())
        if have.get(name) != need.get(name)
    ]
    return "; ".join([*faults[:3], *([f"{len(faults) - 3} more"] if len(faults) > 3 else [])])


def _like(full: Any, target: Any) -> Any:
    """Return a full tensor cut like `target`: the rows of this process, where it has only some."""
    if not (is_sharded(target) and isinstance(full, Tensor) and full.shape == target.shape):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(
        full.to(target.device), target.device_mesh, target.placements, src_data_rank=None
    )


def _load_optimizer(run: Run, saved: dict[str, Any], path: Path) -> None:
    current: dict[str, Any] = {}
    if any(is_sharded(parameter) for parameter in run.model.parameters()):
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        # only the optimizer knows which of its tensors are divided; torch makes them in a step
        # whose lr is 0
        known: Any = get_optimizer_state_dict(run.model, run.optimizer)
        current = known["state"]
    names = {parameter: name for name, parameter in run.model.named_parameters()}
    order = [names[p] for group in run.optimizer.param_groups for p in group["params"]]
    number = {name: index for index, name in enumerate(order)}
    with explaining(
        (ValueError, KeyError),
        lambda error: (
            f"{path}: the state of {run.name} does not fit ({first_line(error)}): continue with "
            "the recipe that it was saved with, or start another run with weights="
        ),
    ):
        state = {
            number[name]: {
                key: _like(value, current.get(name, {}).get(key)) for key, value in values.items()
            }
            for name, values in saved["state"].items()
        }
        groups = [
            {**group, "params": [number[name] for name in group["params"]]}
            for group in saved["param_groups"]
        ]
        run.optimizer.load_state_dict({"state": state, "param_groups": groups})


def digest(values: Any) -> str:
    """Compute the SHA-256 of JSON values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint; a missing, truncated or altered file is a `DamagedCheckpointError`."""
    fault = f"{MANIFEST} is truncated or altered"
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest.pop(CHECKSUM) == digest(manifest):
            known = manifest.pop("sha256")
            saved = Checkpoint(path, **manifest)
            wrong = [
                f"{name} does not match its checksum"
                for name in known
                if sha256(path / name) != known[name]
            ]
            if path.name.startswith(PREFIX) and path.name != f"{PREFIX}{saved.step:08d}":
                wrong.append(f"it contains step {saved.step}")
            if not wrong:
                return saved
            fault = wrong[0]
    except OSError as error:
        fault = f"{error.strerror}: {error.filename}"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass  # JSON of another form
    raise DamagedCheckpointError(f"checkpoint {path} is damaged: {fault}")


def newest(folder: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """Return a folder's newest undamaged checkpoint, None without any; say which are damaged."""
    candidates = newest_first(folder)
    for path in candidates:
        try:
            return open_checkpoint(path)
        except DamagedCheckpointError as error:
            say(f"{error}; falling back to the previous one")
    if candidates:
        raise DamagedCheckpointError(
            f"every checkpoint in {folder} is damaged: start again with --overwrite or --out"
        )
    return None


def newest_first(folder: Path) -> list[Path]:
    """Return the folders of checkpoints in a folder, damaged or not."""
    return sorted(folder.glob(f"{PREFIX}*"), reverse=True)
