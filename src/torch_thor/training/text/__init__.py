"""Text corpora for masked language models: preparing shards of token ids, and reading batches from them."""

from typing import TYPE_CHECKING

from torch_thor.lazy import lazy_names

if TYPE_CHECKING:
    from torch_thor.training.text.corpus import Corpus
    from torch_thor.training.text.document import Document, Fault
    from torch_thor.training.text.loader import PairLoader
    from torch_thor.training.text.manifest import Manifest, Settings
    from torch_thor.training.text.pairs import Masking, PairMaker
    from torch_thor.training.text.preparing import Preparation, prepare
    from torch_thor.training.text.wordpiece import load_tokenizer

__all__ = [
    "Corpus",
    "Document",
    "Fault",
    "Manifest",
    "Masking",
    "PairLoader",
    "PairMaker",
    "Preparation",
    "Settings",
    "load_tokenizer",
    "prepare",
]

_MODULES = {
    "torch_thor.training.text.corpus": ("Corpus",),
    "torch_thor.training.text.document": ("Document", "Fault"),
    "torch_thor.training.text.loader": ("PairLoader",),
    "torch_thor.training.text.manifest": ("Manifest", "Settings"),
    "torch_thor.training.text.pairs": ("Masking", "PairMaker"),
    "torch_thor.training.text.preparing": ("Preparation", "prepare"),
    "torch_thor.training.text.wordpiece": ("load_tokenizer",),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
