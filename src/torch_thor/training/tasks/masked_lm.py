"""Masked-language-model pretraining, with next-sentence prediction if the network has its head.

The loss is the mean cross-entropy of the masked tokens, plus that of the next-sentence prediction
(Devlin et al. 2019, section 3.1). Each masked token is one loss term. The rows of THOR's statistics
are the tokens other than padding.

A batch is a mapping of tensors on the device, but for the number of masked tokens of each example:
it stays on the CPU, so that counting loss terms does not wait for the device.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_thor.errors import UserError, explaining, require
from torch_thor.files import sha256
from torch_thor.training.data.batches import (
    Key,
    batches_per_epoch,
    held_out_keys,
    loaded,
    training_keys,
)
from torch_thor.training.models import bert
from torch_thor.training.parallel import Ranks
from torch_thor.training.recipe_model import TEXTS, Recipe
from torch_thor.training.tasks.task import OWN_TEXT, Batch, Loss, Metric, Task, Terms
from torch_thor.training.text.corpus import HELD_OUT, TOKENIZER, TRAIN, Corpus
from torch_thor.training.text.pairs import PairMaker

EVALUATION_BATCH = 32  # number of examples in a batch
_INPUTS, _KINDS = ("input_ids", "attention_mask"), "token_type_ids"
_MASKED, _FOLLOWING = "masked", "next-sentence accuracy"


class MaskedLM(Task):
    """The task of predicting masked tokens.

    A corpus that is missing, damaged, or has no examples of a required length is refused.
    """

    models = (*bert.BERTS, bert.CONFIGURATION)
    data_sets = TEXTS
    keys = frozenset({"phases", "activation_checkpointing"})
    is_exported = True
    own_data = OWN_TEXT
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
        Metric("nsp_accuracy", _FOLLOWING, _FOLLOWING, True, share=True, over="examples"),
    )  # fmt: skip

    def __init__(
        self,
        recipe: Recipe,
        device: torch.device,
        say: Callable[[str], None],
        *,
        train: bool = True,
    ) -> None:
        self.recipe, self.device, self._say = recipe, device, say
        text_length = recipe.data.text.length
        # A training without phases has one without end.
        self._phases: list[tuple[int | None, int, int]] = [
            (phase.steps, phase.length or text_length, phase.batch_size or recipe.batch_size)
            for phase in recipe.phases
        ] or [(None, text_length, recipe.batch_size)]
        lengths = sorted({text_length, *(length for _, length, _ in self._phases)})
        self.longest, data = lengths[-1], recipe.data
        if data.name == "python-text":
            from torch_thor.training.text.prepare import python_corpus

            self._folder = python_corpus(data.folder(), data.text.vocab_size, lengths, say)
        else:
            require(
                data.root is not None,
                "data.root is not set: give the folder that torch-thor prepare has written",
            )
            self._folder = data.folder()
        self._held_out = self._maker(HELD_OUT, text_length, seed=0)
        if not self._held_out.pairs:
            self.metrics = self.metrics[:-1]
        self._train: dict[int, PairMaker] = {}
        for number, (_, length, _) in enumerate(self._phases if train else []):
            with self._of_phase(number, f".length={length}"):
                self._train[length] = self._train.get(length) or self._maker(
                    TRAIN, length, recipe.seed
                )
        self.samples = sum(len(maker.corpus) for maker in self._train.values())
        self.steps_per_epoch = sum(phase.steps for phase in recipe.phases)
        if train and not recipe.phases:
            self.steps_per_epoch = batches_per_epoch(self.samples, recipe.batch_size)

    def _maker(self, side: str, length: int, seed: int) -> PairMaker:
        text = self.recipe.data.text
        pairs = text.next_sentence and self.recipe.model in bert.BERTS
        corpus = Corpus(self._folder, side, length)
        return PairMaker(corpus, text.masked, whole_words=text.whole_words, pairs=pairs, seed=seed)

    def _of_phase(self, number: int, key: str = "") -> AbstractContextManager[None]:
        return explaining(
            UserError,
            lambda error: f"phases[{number}]{key}: {error}" if self.recipe.phases else str(error),
        )

    @property
    def tokenizer_file(self) -> Path:
        """The file of the corpus that contains the tokenizer."""
        return self._folder / TOKENIZER

    @property
    def tokenizer_checksum(self) -> str:
        """The SHA-256 of the file of the tokenizer."""
        return self._held_out.corpus.tokenizer_checksum

    @property
    def data_checksums(self) -> Mapping[str, str]:
        """The checksums of the files of the corpus, and of the network's configuration."""
        checksums = {"evaluation data": self._held_out.corpus.checksum}
        for maker in self._train.values():
            checksums["training data"] = maker.corpus.checksum
        if self.recipe.model.endswith(bert.CONFIGURATION):
            checksums["network's settings"] = sha256(Path(self.recipe.model))
        return checksums

    def tokenizer(self) -> Any:
        """Return the tokenizer as a `PreTrainedTokenizerFast` of transformers."""
        from transformers import PreTrainedTokenizerFast

        from torch_thor.training.text.wordpiece import (
            CLASS,
            MASK,
            PAD,
            SEPARATOR,
            UNKNOWN,
            load_tokenizer,
        )

        return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=load_tokenizer(self.tokenizer_file),
            model_max_length=self.longest,
            unk_token=UNKNOWN,
            pad_token=PAD,
            cls_token=CLASS,
            sep_token=SEPARATOR,
            mask_token=MASK,
            model_input_names=[*_INPUTS, *([_KINDS] if self._held_out.pairs else [])],
        )

    def model(self) -> nn.Module:
        """Build the network with random weights from torch's global generator, on the CPU."""
        maker, name = self._held_out, self.recipe.model
        model: Any = bert.build(
            name, maker.vocab_size, self.longest, maker.pad, next_sentence=maker.pairs
        )
        if self.recipe.activation_checkpointing:
            require(
                bool(model.supports_gradient_checkpointing),
                f"activation_checkpointing=true: {type(model).__name__} of model={name} does not "
                "support it; leave it false",
            )
            # transformers before 5.20 has only the second name
            enable = (
                getattr(model, "activation_checkpointing_enable", None)
                or model.gradient_checkpointing_enable
            )
            enable({"use_reentrant": False})
        trained: nn.Module = model.train()
        return trained

    def batches(self, ranks: Ranks, start: int) -> Iterator[Batch]:
        """Return the training batches of a process from a step on, without end."""
        parts = []
        # epochs count on from phase to phase, so that no two of the same length have the same masks
        epoch = first = 0
        for number, (steps, length, size) in enumerate(self._phases):
            maker, done = self._train[length], max(0, start - first)
            with self._of_phase(number):
                per_epoch = batches_per_epoch(len(maker.corpus), size, ranks.world)
            keys = training_keys(
                len(maker.corpus), size, self.recipe.seed, ranks, epoch * per_epoch + done
            )
            parts.append((maker, keys if steps is None else islice(keys, max(0, steps - done))))
            epoch, first = epoch + math.ceil((steps or 0) / per_epoch), first + (steps or 0)
        for maker, keys in parts:  # one after the other, so that only one has worker processes
            yield from self._loaded(maker, keys)

    def held_out(self, ranks: Ranks) -> Iterable[tuple[Batch, bool]]:
        """Return a process's evaluation batches, same for all epochs and seeds, and which count."""
        dealt = list(held_out_keys(len(self._held_out.corpus), EVALUATION_BATCH, ranks))
        keys = ([(0, number) for number in numbers] for numbers, _ in dealt)
        return zip(self._loaded(self._held_out, keys), (counts for _, counts in dealt), strict=True)

    def _loaded(self, maker: PairMaker, keys: Iterator[list[Key]]) -> Iterator[Batch]:
        data = self.recipe.data
        for batch, _ in loaded(
            maker,
            keys,
            workers=data.workers.count,
            prefetch=data.workers.prefetch,
            device=torch.device("cpu"),
            max_broken=data.max_broken,
            say=self._say,
        ):
            ready = (
                {key: value.pin_memory() for key, value in batch.items()}
                if self.device.type == "cuda"
                else batch
            )
            yield {
                key: value if key == _MASKED else value.to(self.device, non_blocking=True)
                for key, value in ready.items()
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
        if self.recipe.compile:
            output = net(**inputs)
        else:
            with bert.scored_tokens(net, rows):
                output = net(**inputs)
        scores = output.prediction_logits if pairs else output.logits
        if scores.dim() == 3:  # scores of all tokens, not only of the masked ones
            scores = scores.flatten(0, 1)[rows]
        return scores, labels[rows], output.seq_relationship_logits if pairs else None
