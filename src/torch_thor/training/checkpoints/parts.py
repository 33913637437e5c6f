"""Tensors in the files of `torch.distributed.checkpoint`, into which every process writes the parts that it holds.

    .metadata          names, shapes and places of all tensors
    __0_0.distcp ...   the parts that each process wrote

Torch reads the metadata by unpickling, which could execute code; here only the classes that describe tensors are
accepted.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torch_thor.capture.sharding import is_sharded
from torch_thor.training.checkpoints.manifest import METADATA
from torch_thor.training.errors import DamagedCheckpointError, UserError, first_line, require

if TYPE_CHECKING:  # importing it takes a second, which only divided checkpoints are worth
    from torch.distributed.checkpoint.filesystem import FileSystemReader

_DESCRIPTIONS = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
}  # fmt: skip


def write_parts(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors of all processes. Every process must call it, with the same names.

    A tensor that is divided among the processes is written in parts, and any other one by one of the processes.

    Args:
        folder: The folder, which all processes see and must exist.
        tensors: The tensors by name; the values of tensors that are not divided are equal on all processes.

    Raises:
        RuntimeError: On every process, if one of them cannot write.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        save(dict(tensors), storage_writer=FileSystemWriter(str(folder)))
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise RuntimeError(f"on rank {rank}: {getattr(cause, 'strerror', None) or first_line(cause)}") from error


def read_parts(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Read tensors in place, divided or not. It does not communicate.

    Args:
        folder: The folder that `write_parts` has filled.
        tensors: Tensors of the shapes that were written, by name.

    Raises:
        UserError: If a name or a shape is not that of the folder.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each process reads for itself
            load(dict(tensors), storage_reader=_reader(folder), no_dist=True)
    except CheckpointException as error:
        raise UserError(first_line(next(iter(error.failures.values()))[0])) from error


def empty_tensors(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Make whole tensors for `read_parts`.

    Args:
        folder: The folder that `write_parts` has filled.
        prefix: The beginning of the names to read.

    Returns:
        Tensors on the CPU, not initialised, by name.
    """
    described: Any = _reader(folder).read_metadata().state_dict_metadata
    return {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in described.items()
        if name.startswith(prefix)
    }


def fill_parts(model: nn.Module, whole: Mapping[str, Tensor]) -> None:
    """Load whole weights into a network that is divided among processes. It does not communicate.

    Args:
        model: The network.
        whole: The weights by name. Of a weight with several names, one suffices.

    Raises:
        UserError: If a weight is missing, not expected, or of another shape.
    """
    from torch.distributed.tensor import distribute_tensor

    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    kept = model.state_dict().keys()
    own: dict[str, Any] = {name: tensor for name, tensor in named if name in kept}
    given = {id(own[name]) for name in whole if name in own}
    missing = [name for name in own if id(own[name]) not in given]
    unexpected = [name for name in whole if name not in own]
    require(not missing, f"missing: {', '.join(missing)}")
    require(not unexpected, f"not expected: {', '.join(unexpected)}")
    for name, weight in whole.items():
        target = own[name].detach()
        require(target.shape == weight.shape, f"{name} has the shape {tuple(weight.shape)}, not {tuple(target.shape)}")
        if is_sharded(target):
            weight = weight.to(target.device)
            weight = distribute_tensor(weight, target.device_mesh, target.placements, src_data_rank=None)
        target.copy_(weight)


def _reader(folder: Path) -> FileSystemReader:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            with (folder / METADATA).open("rb") as file:
                found = _Descriptions(file).load()
            # other values than tensors would be unpickled
            kinds = {type(one) for one in found.state_dict_metadata.values()} if isinstance(found, Metadata) else set()
            if not isinstance(found, Metadata) or kinds - {TensorStorageMetadata}:
                raise pickle.UnpicklingError("it describes other things than tensors")
            if found.storage_meta is not None:
                found.storage_meta.load_id = self.load_id
            return found

    try:
        reader = Reader(str(folder))
        reader.read_metadata()
    except (pickle.UnpicklingError, OSError, EOFError, AttributeError) as error:
        raise DamagedCheckpointError(f"{folder / METADATA} cannot be read ({first_line(error)})") from error
    return reader


class _Descriptions(pickle.Unpickler):
    """Unpickles descriptions of tensors, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _DESCRIPTIONS.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not describe a tensor")
