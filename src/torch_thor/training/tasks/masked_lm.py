"""Masked-language-model pretraining, with next-sentence prediction if the network has a head for it.

The loss is the mean cross-entropy of the masked tokens, plus that of the next-sentence prediction (Devlin et al. 2019,
section 3.1). Each masked token is one loss term. The rows of THOR's statistics are the tokens other than padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_thor.training.config.data_spec import TEXTS
from torch_thor.training.data.shards import EvaluationOrder, Shard, WholeBatches
from torch_thor.training.data.stream import BatchLoader, Streams
from torch_thor.training.data.workers import check_workers
from torch_thor.training.engine import parallel
from torch_thor.training.errors import require
from torch_thor.training.models import masked_lm as models
from torch_thor.training.tasks import text_batches
from torch_thor.training.tasks.checks import check_no_classes
from torch_thor.training.tasks.task import Batch, Loss, Metric, Terms

if TYPE_CHECKING:  # imported for types only: the recipe module uses the tasks, to check a recipe
    from pathlib import Path

    from torch_thor.training.config.recipe import Recipe
    from torch_thor.training.text.pairs import PairMaker

EVALUATION_BATCH = 32  # number of examples in a batch
_NEXT_SENTENCE = "next_sentence_label"


class MaskedLM:
    """The task of predicting masked tokens, on batches from :class:`torch_thor.training.text.pairs.PairMaker`.

    Args:
        train: The makers of training examples, by the length of their examples; empty if the task is only evaluated.
        held_out: The maker of evaluation examples.
        recipe: The recipe, which specifies the network, the batch size, the phases and the seed.
        device: The device of the batches.
    """

    unit: ClassVar[str] = "masked tokens"
    METRICS: ClassVar[tuple[Metric, ...]] = (
        Metric("loss", "masked-token loss", "held-out loss", higher_is_better=False),
        Metric(
            "mlm_accuracy",
            "masked-token accuracy",
            "masked-token accuracy",
            higher_is_better=True,
            primary=True,
            share=True,
        ),
        Metric(
            "perplexity",
            "perplexity",
            "perplexity",
            higher_is_better=False,
            derived=lambda means: math.exp(min(means["loss"], 700.0)),  # larger exponents would overflow a float
        ),
        Metric(
            "nsp_accuracy",
            "next-sentence accuracy",
            "next-sentence accuracy",
            higher_is_better=True,
            share=True,
            over="examples",
        ),
    )

    def __init__(
        self, train: Mapping[int, PairMaker], held_out: PairMaker, recipe: Recipe, device: torch.device
    ) -> None:
        self.train, self.held_out, self.recipe, self.device = train, held_out, recipe, device

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        """Check that the task supports a recipe.

        Args:
            recipe: The recipe.

        Raises:
            UserError: If it does not.
        """
        check_no_classes(recipe)
        require(
            models.is_known(recipe.model),
            f"model={recipe.model} is no network of task={recipe.task}: use {', '.join(models.BERTS)}, or the file of "
            f"a transformers configuration (config.json)",
        )
        require(
            recipe.data.name in TEXTS,
            f"data.name={recipe.data.name}: task={recipe.task} takes {' or '.join(TEXTS)} (from torch-thor prepare)",
        )

    @classmethod
    def open(
        cls, recipe: Recipe, device: torch.device, say: Callable[[str], None], report: Callable[[str], None]
    ) -> MaskedLM:
        """Open the training and held-out examples of the corpus.

        Args:
            recipe: The recipe.
            device: The device of the batches.
            say: Called with a message if the corpus has to be prepared first.
            report: Not used.

        Returns:
            The task.
        """
        check_workers(recipe.data.workers, parallel.local_processes(), say)
        folder, held_out = _held_out(recipe, say)
        return cls(text_batches.training_makers(recipe, folder), held_out, recipe, device)

    @classmethod
    def open_saved(
        cls, recipe: Recipe, device: torch.device, say: Callable[[str], None], changed: set[str]
    ) -> MaskedLM:
        """Open the held-out examples to evaluate a trained network.

        Args:
            recipe: The recipe.
            device: The device of the batches.
            say: Called with a message if the corpus has to be prepared first.
            changed: Not used.

        Returns:
            The task.
        """
        return cls({}, _held_out(recipe, say)[1], recipe, device)

    @classmethod
    def saved_recipe(cls, trained: Recipe, recipe: Recipe, changed: Sequence[str]) -> Recipe:
        """Return the recipe to evaluate with, which may name any corpus.

        Its tokenizer is compared with that of the training when the checkpoint is loaded.

        Args:
            trained: The recipe that the network was trained with.
            recipe: The same recipe with the changed keys.
            changed: The names of the changed keys.

        Returns:
            The recipe to evaluate with.
        """
        return recipe

    @property
    def tokenizer_file(self) -> Path:
        """The file of the corpus that contains the tokenizer."""
        from torch_thor.training.text.manifest import TOKENIZER

        return self.held_out.corpus.folder / TOKENIZER

    @property
    def tokenizer_checksum(self) -> str:
        """The SHA-256 checksum of the file of the tokenizer."""
        return self.held_out.corpus.manifest.tokenizer_checksum

    def tokenizer(self) -> Any:
        """Return the tokenizer in the form that transformers uses.

        Returns:
            A `PreTrainedTokenizerFast`.
        """
        from transformers import PreTrainedTokenizerFast

        from torch_thor.training.text.wordpiece import CLASS, MASK, PAD, SEPARATOR, UNKNOWN

        return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=self.held_out.corpus.tokenizer(),
            model_max_length=text_batches.longest(self.recipe),
            unk_token=UNKNOWN,
            pad_token=PAD,
            cls_token=CLASS,
            sep_token=SEPARATOR,
            mask_token=MASK,
        )

    def build_model(self) -> nn.Module:
        """Build the network with random weights from torch's global generator, which the caller must seed first.

        Returns:
            The network, on the CPU.
        """
        maker = self.held_out
        model = models.build(
            self.recipe.model, maker.vocab_size, text_batches.longest(self.recipe), maker.pad, next_sentence=maker.pairs
        )
        if self.recipe.activation_checkpointing:
            models.checkpoint_activations(model, self.recipe.model)
        return model

    def open_data(self, shard: Shard) -> Streams:
        """Open the batches of a rank, from the beginning of the corpus.

        Args:
            shard: The rank and the number of ranks.

        Returns:
            The training batches and the evaluation batches of the rank.
        """
        evaluation = EvaluationOrder(len(self.held_out.corpus), EVALUATION_BATCH, shard)
        return Streams(
            text_batches.training_batches(self.train, self.recipe, shard, self.device),
            text_batches.batch_loader(self.held_out, self.recipe, evaluation, self.device, fixed=True),
        )

    def open_evaluation(self, shard: Shard) -> BatchLoader:
        """Open the evaluation batches of a rank, without training batches.

        Args:
            shard: The rank and the number of ranks.

        Returns:
            The batches of the rank.
        """
        order = WholeBatches(len(self.held_out.corpus), EVALUATION_BATCH, shard)
        return text_batches.batch_loader(self.held_out, self.recipe, order, self.device, fixed=True)

    def terms(self, batch: Batch) -> Terms:
        """Count the masked tokens of a batch.

        Args:
            batch: A mapping of tensors.

        Returns:
            The number of masked tokens, and a mask of the tokens other than padding: bool, (batch, length).
        """
        return Terms(int((batch["labels"] >= 0).sum()), batch["attention_mask"].bool())

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Compute the mean cross-entropy of the masked tokens, plus that of the next-sentence prediction.

        Args:
            model: The network.
            batch: A mapping of tensors.

        Returns:
            The loss, and the scores of the masked tokens, (masked tokens, vocabulary).
        """
        scores, labels, following = self._predict(model, batch)
        mean = functional.cross_entropy(scores, labels)
        if following is not None:
            mean = mean + functional.cross_entropy(following, batch[_NEXT_SENTENCE])
        return Loss(mean, scores)

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Sum the cross-entropy and the correct predictions over a batch.

        Args:
            model: The network.
            batch: A mapping of tensors.

        Returns:
            The sums `loss` and `mlm_accuracy` over the masked tokens; with next-sentence prediction also `nsp_accuracy`
            over the examples, and their number `examples`.
        """
        scores, labels, following = self._predict(model, batch)
        found = {
            "loss": functional.cross_entropy(scores, labels, reduction="sum"),
            "mlm_accuracy": (scores.argmax(-1) == labels).sum(),
        }
        if following is not None:
            found["nsp_accuracy"] = (following.argmax(-1) == batch[_NEXT_SENTENCE]).sum()
            found["examples"] = torch.tensor(len(following), device=following.device)
        return found

    def metrics(self) -> Sequence[Metric]:
        """Return the metrics of an evaluation.

        Returns:
            The loss, the masked-token accuracy (the primary metric), the perplexity, and with next-sentence prediction
            its accuracy.
        """
        return self.METRICS if self.held_out.pairs else self.METRICS[:-1]

    def _predict(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the scores and labels of the masked tokens, and the scores of the next-sentence prediction."""
        inputs: dict[str, Any] = {key: batch[key] for key in ("input_ids", "attention_mask")}
        if self.held_out.pairs:
            inputs["token_type_ids"] = batch["token_type_ids"]
        rows = (batch["labels"] >= 0).flatten().nonzero()[:, 0]
        if self.recipe.compile:
            output = model(**inputs)
        else:
            with models.scored_tokens(model, rows):
                output = model(**inputs)
        scores = output.prediction_logits if self.held_out.pairs else output.logits
        following = output.seq_relationship_logits if self.held_out.pairs else None
        if scores.dim() == 3:  # scores of all tokens, not only of the masked ones
            scores = scores.flatten(0, 1)[rows]
        return scores, batch["labels"].flatten()[rows], following


def _held_out(recipe: Recipe, say: Callable[[str], None]) -> tuple[Path, PairMaker]:
    """Return the folder of the corpus and the maker of evaluation examples."""
    folder = text_batches.corpus_folder(recipe, say)
    return folder, text_batches.pair_maker(recipe, folder, "held-out", recipe.data.text.length)
