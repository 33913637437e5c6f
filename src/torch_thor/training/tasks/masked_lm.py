"""Masked-language-model pretraining, with next-sentence prediction if the network has its head.

The loss is the mean cross-entropy of the masked tokens, plus the next-sentence prediction's
(Devlin et al. 2019, section 3.1). Each masked token is one loss term. The rows of THOR's statistics
are the tokens other than padding.

A batch is a mapping of tensors on the device, but for the number of masked tokens of each example:
it stays on the CPU, so that counting loss terms does not wait for the device.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_thor.errors import require
from torch_thor.training.data.batches import (
    Key,
    batches_per_epoch,
    held_out_keys,
    loaded,
    training_keys,
)
from torch_thor.training.models import bert
from torch_thor.training.parallel import Ranks
from torch_thor.training.recipe_model import Recipe
from torch_thor.training.tasks.task import Batch, Loss, Metric, Task, Terms
from torch_thor.training.text import wordpiece
from torch_thor.training.text.corpus import HELD_OUT, TOKENIZER, TRAIN, Corpus
from torch_thor.training.text.pairs import PairMaker

EVALUATION_BATCH = 32  # number of examples in a batch
_INPUTS, _KINDS = ("input_ids", "attention_mask"), "token_type_ids"
_MASKED = "masked"


class MaskedLM(Task):
    """The task of predicting masked tokens of a corpus."""

    unit = "masked tokens"
    metrics: Sequence[Metric] = (
        Metric("loss", "masked-token loss", "held-out loss", False),
        Metric("mlm_accuracy", "masked-token accuracy", "masked-token accuracy", True, primary=True,
        share=True),
        Metric(
            "perplexity", "perplexity", "perplexity", False,
            # larger exponents would overflow a float
            derived=lambda means: math.exp(min(means["loss"], 700.0)),
        ),
        Metric("nsp_accuracy", "next-sentence accuracy", "next-sentence accuracy", True, share=True,
        over="examples"),
    )  # fmt: skip

    def __init__(
        self,
        recipe: Recipe,
        device: torch.device,
        say: Callable[[str], None],
        *,
        train: bool = True,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        self.recipe, self.device = recipe, device
        text, folder = recipe.data.text, recipe.data.folder()
        # a training without phases has a single phase without end
        self._phases: list[tuple[int | None, int, int]] = [
            (phase.steps, phase.length or text.length, phase.batch_size or recipe.batch_size)
            for phase in recipe.phases
        ] or [(None, text.length, recipe.batch_size)]
        lengths = sorted({text.length, *(length for _, length, _ in self._phases)})
        self.longest = lengths[-1]
        if recipe.data.name == "python-text":
            from torch_thor.training.text.prepare import python_corpus

            folder = python_corpus(folder, text.vocab_size, lengths, say)
        pairs = text.next_sentence and recipe.model in bert.BERTS

        def maker(side: str, length: int, seed: int) -> PairMaker:
            return PairMaker(
                Corpus(folder, side, length),
                text.masked,
                whole_words=text.whole_words,
                pairs=pairs,
                seed=seed,
            )

        self._held_out = maker(HELD_OUT, text.length, 0)
        self._train = {length: maker(TRAIN, length, recipe.seed) for length in lengths if train}
        self.metrics = self.metrics if pairs else self.metrics[:-1]
        examples = sum(map(len, self._train.values()))
        self.steps_per_epoch = sum(phase.steps for phase in recipe.phases)
        if train and not recipe.phases:
            self.steps_per_epoch = batches_per_epoch(examples, recipe.batch_size)
        checksums = self._held_out.corpus.checksums
        self.data = {
            "examples": examples,
            "text": checksums[TRAIN],
            "tokenizer": checksums[TOKENIZER],
        }
        require(
            data is None or data["tokenizer"] == checksums[TOKENIZER],
            f"the network was trained with another tokenizer than {folder} has: prepare the "
            "corpus with --tokenizer and the tokenizer.json of its corpus",
        )

    def tokenizer(self) -> Any:
        """Return the tokenizer as a `PreTrainedTokenizerFast` of transformers."""
        import transformers

        class PreTrainedTokenizerFast(transformers.PreTrainedTokenizerFast):
            """Has the name that transformers 4 knows too; 5 would write its own into the files."""

        return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=wordpiece.load_tokenizer(self._held_out.corpus.tokenizer),
            model_max_length=self.longest,
            unk_token=wordpiece.UNKNOWN,
            pad_token=wordpiece.PAD,
            cls_token=wordpiece.CLASS,
            sep_token=wordpiece.SEPARATOR,
            mask_token=wordpiece.MASK,
            model_input_names=[*_INPUTS, *([_KINDS] if self._held_out.pairs else [])],
        )

    def model(self) -> nn.Module:
        """Build the network with random weights from torch's global generator, on the CPU."""
        pieces, pairs = self._held_out.pieces, self._held_out.pairs
        model = bert.build(
            self.recipe.model, len(pieces), self.longest, pieces[wordpiece.PAD], next_sentence=pairs
        )
        if self.recipe.activation_checkpointing:
            # transformers before 5.20 has only the second name
            enable: Any = (
                getattr(model, "activation_checkpointing_enable", None)
                or model.gradient_checkpointing_enable
            )
            enable({"use_reentrant": False})
        return model

    def batches(self, ranks: Ranks, start: int) -> Iterator[Batch]:
        """Return the training batches of a process from a step on, without end."""
        parts = []
        # epochs count on from phase to phase, so that no two of the same length have the same masks
        epoch = first = 0
        for steps, length, size in self._phases:
            maker, done = self._train[length], max(0, start - first)
            per_epoch = batches_per_epoch(len(maker), size, ranks.world)
            begin = epoch * per_epoch + done
            keys = training_keys(len(maker), size, self.recipe.seed, ranks, begin)
            parts.append((maker, keys if steps is None else islice(keys, max(0, steps - done))))
            epoch, first = epoch + math.ceil((steps or 0) / per_epoch), first + (steps or 0)
        for maker, keys in parts:  # one after the other, so that only one has worker processes
            yield from self._loaded(maker, keys)

    def held_out(self, ranks: Ranks) -> Iterable[tuple[Batch, bool]]:
        """Return a process's evaluation batches, same for all epochs and seeds, and which count."""
        dealt = list(held_out_keys(len(self._held_out), EVALUATION_BATCH, ranks))
        keys = ([(0, number) for number in numbers] for numbers, _ in dealt)
        return zip(self._loaded(self._held_out, keys), (counts for _, counts in dealt), strict=True)

    def _loaded(self, maker: PairMaker, keys: Iterator[list[Key]]) -> Iterator[Batch]:
        own, pinned = self.recipe.data.workers, self.device.type == "cuda"
        for batch in loaded(
            maker, keys, workers=own.count, prefetch=own.prefetch, device=torch.device("cpu")
        ):
            yield {
                key: value
                if key == _MASKED
                else (value.pin_memory() if pinned else value).to(self.device, non_blocking=True)
                for key, value in batch.items()
            }

    def terms(self, batch: Batch) -> Terms:
        """Count the masked tokens of a batch; the rows are the tokens other than padding."""
        return Terms(int(batch[_MASKED].sum()), batch["attention_mask"].bool())

    def loss(self, net: nn.Module, batch: Batch) -> Loss:
        """Compute the training loss and the masked tokens' scores, (masked tokens, vocabulary)."""
        scores, labels, following = self._predict(net, batch)
        mean = functional.cross_entropy(scores, labels)
        if following is not None:
            mean = mean + functional.cross_entropy(following, batch["next_sentence_label"])
        return Loss(mean, scores)

    def measure(self, net: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Sum the cross-entropy and the correct predictions over a batch."""
        scores, labels, following = self._predict(net, batch)
        sums = {
            "loss": functional.cross_entropy(scores, labels, reduction="sum"),
            "mlm_accuracy": (scores.argmax(-1) == labels).sum(),
        }
        if following is not None:
            sums["nsp_accuracy"] = (following.argmax(-1) == batch["next_sentence_label"]).sum()
            sums["examples"] = torch.tensor(len(following), device=following.device)
        return sums

    def _predict(self, net: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the masked tokens' scores and labels, and next-sentence prediction scores."""
        pairs, labels = self._held_out.pairs, batch["labels"].flatten()
        inputs = {key: batch[key] for key in (*_INPUTS, *([_KINDS] if pairs else []))}
        # their number is known, so that finding them does not wait for the device
        rows = torch.nonzero_static(labels >= 0, size=int(batch[_MASKED].sum()))[:, 0]
        with nullcontext() if self.recipe.compile else bert.scored_tokens(net, rows):
            output = net(**inputs)
        scores = output.prediction_logits if pairs else output.logits
        if scores.dim() == 3:  # scores of all tokens, not only of the masked tokens
            scores = scores.flatten(0, 1)[rows]
        return scores, labels[rows], output.seq_relationship_logits if pairs else None
