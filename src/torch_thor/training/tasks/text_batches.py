"""The corpus for a recipe of a masked language model, and the batches of the training phases."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torch_thor.training.config.data_spec import PYTHON_TEXT
from torch_thor.training.data.phased_stream import PhasedStream
from torch_thor.training.data.shards import BatchOrder, Shard, TrainingOrder
from torch_thor.training.data.stream import BatchLoader, TrainingBatches, TrainingStream
from torch_thor.training.errors import UserError
from torch_thor.training.models import masked_lm as models

if TYPE_CHECKING:  # these modules need the optional text libraries
    from torch_thor.training.config.recipe import Recipe
    from torch_thor.training.text.pairs import PairMaker


def longest(recipe: Recipe) -> int:
    """Return the maximum length of an example in any phase or in an evaluation.

    Args:
        recipe: The recipe.

    Returns:
        The length in tokens.
    """
    return max(_lengths(recipe))


def corpus_folder(recipe: Recipe, say: Callable[[str], None]) -> Path:
    """Find the corpus of a recipe. The python-text corpus is prepared when it is first used.

    Args:
        recipe: The recipe.
        say: Called with a message if a corpus has to be prepared.

    Returns:
        The folder of the corpus.

    Raises:
        UserError: If the recipe does not name a corpus.
    """
    from torch_thor.training.text.python_corpus import python_corpus

    text, root = recipe.data.text, recipe.data.root
    if recipe.data.name == PYTHON_TEXT:
        return python_corpus(recipe.data.folder(), text.vocab_size, _lengths(recipe), say)
    if root is None:
        raise UserError("data.root is not set: give the folder that torch-thor prepare has written")
    return Path(root).expanduser()


def training_makers(recipe: Recipe, folder: Path) -> dict[int, PairMaker]:
    """Open the training examples of all phases.

    Args:
        recipe: The recipe.
        folder: The folder of the corpus.

    Returns:
        The makers of examples, by the length of their examples.

    Raises:
        UserError: If the corpus has no examples of a required length; the message names the phase.
    """
    own = recipe.data.text.length
    makers: dict[int, PairMaker] = {}
    for number, phase in enumerate(recipe.phases):
        length = phase.length or own
        with _saying(f"phases[{number}].length={length}"):
            makers[length] = makers.get(length) or pair_maker(recipe, folder, "train", length)
    return makers or {own: pair_maker(recipe, folder, "train", own)}


def pair_maker(recipe: Recipe, folder: Path, side: str, length: int) -> PairMaker:
    """Open one side of a corpus.

    Args:
        recipe: The recipe.
        folder: The folder of the corpus.
        side: `train` or `held-out`.
        length: Number of tokens per example.

    Returns:
        The maker of examples.
    """
    from torch_thor.training.text.corpus import Corpus
    from torch_thor.training.text.pairs import Masking, PairMaker

    text = recipe.data.text
    pairs = text.next_sentence and models.takes_pairs(recipe.model)
    return PairMaker(Corpus(folder, side, length), Masking(text.masked, text.whole_words), pairs=pairs)


def training_batches(
    makers: Mapping[int, PairMaker], recipe: Recipe, shard: Shard, device: torch.device
) -> TrainingBatches:
    """Open the training batches of all phases.

    Args:
        makers: The makers of examples, by the length of their examples.
        recipe: The recipe.
        shard: The rank and the number of ranks.
        device: The device of the batches.

    Returns:
        The batches of the rank.

    Raises:
        UserError: If the batch size of a phase does not suit the corpus or the number of ranks; the message names the
            phase.
    """

    def stream(length: int, batch_size: int, epoch: int = 0) -> TrainingStream:
        maker = makers[length]
        order = TrainingOrder(len(maker.corpus), batch_size, recipe.seed, shard)
        return TrainingStream(batch_loader(maker, recipe, order, device), order, epoch)

    own = recipe.data.text.length
    if not recipe.phases:
        return stream(own, recipe.batch_size)
    streams: list[tuple[int, TrainingStream]] = []
    epoch = 0  # counted on from phase to phase, so that no two phases of the same length have the same masks
    for number, phase in enumerate(recipe.phases):
        with _saying(f"phases[{number}]"):
            opened = stream(phase.length or own, phase.batch_size or recipe.batch_size, epoch)
        streams.append((phase.steps, opened))
        epoch += math.ceil(phase.steps / len(opened))
    return PhasedStream(streams)


def batch_loader(
    maker: PairMaker, recipe: Recipe, order: BatchOrder, device: torch.device, *, fixed: bool = False
) -> BatchLoader:
    """Open batches of examples of one length.

    Args:
        maker: Makes the examples.
        recipe: The recipe.
        order: The examples of each batch, and the order of the batches.
        device: The device of the batches.
        fixed: Whether examples are the same in each epoch and for each seed, as in an evaluation.

    Returns:
        The batches.
    """
    from torch_thor.training.text.loader import PairLoader

    seed = 0 if fixed else recipe.seed
    return PairLoader(maker, order, seed, device, workers=recipe.data.workers, fixed=fixed)


def _lengths(recipe: Recipe) -> list[int]:
    own = recipe.data.text.length
    return sorted({own, *(phase.length or own for phase in recipe.phases)})


@contextmanager
def _saying(where: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
