"""Batches: which samples each process gets, and the readers of images and text behind them."""

from typing import TYPE_CHECKING

from torch_thor.lazy import lazy_names

if TYPE_CHECKING:
    from torch_thor.training.config.data_spec import CIFAR, IMAGENET, DataSpec, ImageTransform, Workers
    from torch_thor.training.config.text_spec import TextSpec
    from torch_thor.training.data.decoding import BrokenImageError, decode_rgb
    from torch_thor.training.data.folder import FolderSource, list_images, open_evaluation_folder, open_folders
    from torch_thor.training.data.image_set import EvaluationImages, ImageSet
    from torch_thor.training.data.image_source import ImageSource, MemorySource
    from torch_thor.training.data.in_memory import DataBundle, load_data
    from torch_thor.training.data.named import open_data, open_evaluation
    from torch_thor.training.data.phased_stream import PhasedStream
    from torch_thor.training.data.python_text import WindowLoader, WindowOrder, characters
    from torch_thor.training.data.reading import raw_loader
    from torch_thor.training.data.shards import (
        BatchOrder,
        EvaluationOrder,
        Shard,
        TrainingOrder,
        WholeBatches,
        epoch_order,
    )
    from torch_thor.training.data.stream import (
        BatchLoader,
        DataSet,
        EvaluationSet,
        MemoryLoader,
        Streams,
        TrainingBatches,
        TrainingStream,
    )
    from torch_thor.training.data.transforms import EvaluationTransform, Normalize, TrainingTransform

__all__ = [
    "CIFAR",
    "IMAGENET",
    "BatchLoader",
    "BatchOrder",
    "BrokenImageError",
    "DataBundle",
    "DataSet",
    "DataSpec",
    "EvaluationImages",
    "EvaluationOrder",
    "EvaluationSet",
    "EvaluationTransform",
    "FolderSource",
    "ImageSet",
    "ImageSource",
    "ImageTransform",
    "MemoryLoader",
    "MemorySource",
    "Normalize",
    "PhasedStream",
    "Shard",
    "Streams",
    "TextSpec",
    "TrainingBatches",
    "TrainingOrder",
    "TrainingStream",
    "TrainingTransform",
    "WholeBatches",
    "WindowLoader",
    "WindowOrder",
    "Workers",
    "characters",
    "decode_rgb",
    "epoch_order",
    "list_images",
    "load_data",
    "open_data",
    "open_evaluation",
    "open_evaluation_folder",
    "open_folders",
    "raw_loader",
]

_MODULES = {
    "torch_thor.training.config.data_spec": ("CIFAR", "IMAGENET", "DataSpec", "ImageTransform", "Workers"),
    "torch_thor.training.config.text_spec": ("TextSpec",),
    "torch_thor.training.data.decoding": ("BrokenImageError", "decode_rgb"),
    "torch_thor.training.data.folder": ("FolderSource", "list_images", "open_evaluation_folder", "open_folders"),
    "torch_thor.training.data.image_set": ("EvaluationImages", "ImageSet"),
    "torch_thor.training.data.image_source": ("ImageSource", "MemorySource"),
    "torch_thor.training.data.in_memory": ("DataBundle", "load_data"),
    "torch_thor.training.data.named": ("open_data", "open_evaluation"),
    "torch_thor.training.data.phased_stream": ("PhasedStream",),
    "torch_thor.training.data.python_text": ("WindowLoader", "WindowOrder", "characters"),
    "torch_thor.training.data.reading": ("raw_loader",),
    "torch_thor.training.data.shards": (
        "BatchOrder",
        "EvaluationOrder",
        "Shard",
        "TrainingOrder",
        "WholeBatches",
        "epoch_order",
    ),
    "torch_thor.training.data.stream": (
        "BatchLoader",
        "DataSet",
        "EvaluationSet",
        "MemoryLoader",
        "Streams",
        "TrainingBatches",
        "TrainingStream",
    ),
    "torch_thor.training.data.transforms": ("EvaluationTransform", "Normalize", "TrainingTransform"),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
