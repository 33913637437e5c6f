"""What `torch-thor plan` measures costs with: a model with memory, and its loss on random samples of a given number."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_thor.training.errors import require
from torch_thor.training.models import masked_lm
from torch_thor.training.reports.split_subject import Subject, load_subject

VOCABULARY = 30522  # of a BERT that is given by its size, as in the published ones
CLASSES = 1000  # of ImageNet; torchvision's and timm's models have as many by default
_MASKED = 0.15  # share of the tokens of a masked language model that are predicted


@dataclass(frozen=True)
class Sample:
    """A model and its loss.

    Args:
        model: The model, on the device.
        run: Runs the model, or a wrapper of it, on so many samples and returns the loss.
        description: What the samples are, in words.
    """

    model: nn.Module
    run: Callable[[nn.Module, int], Tensor]
    description: str

    def loss(self, samples: int) -> Tensor:
        """Return the loss of so many samples.

        Args:
            samples: Their number.

        Returns:
            The loss.
        """
        return self.run(self.model, samples)


def make_sample(word: str, device: torch.device, *, count: int, pixels: int, length: int) -> Sample:
    """Build a model with random weights, and samples for it.

    Args:
        word: A torchvision or timm name, a size of BERT, a transformers `config.json`, or `FILE.py:FUNCTION`. The
            function must return (model, (inputs, targets)) or (model, (inputs, targets), loss function).
        device: The device.
        count: The largest number of samples.
        pixels: Height and width of images.
        length: Tokens of a text.

    Returns:
        The model and its loss. Values are random, because times do not depend on them.

    Raises:
        UserError: If the model cannot be built, or a function returns too few samples.
    """
    torch.manual_seed(0)
    if masked_lm.is_known(word):
        network = masked_lm.build(word, VOCABULARY, length=length, pad=0).to(device)
        return Sample(network, _masked_loss(count, length, device), f"{length} random tokens")
    subject = load_subject(word, seed=0)
    model = subject.model.to(device)
    if subject.sample_batch is not None:
        return Sample(model, _own_loss(subject, count, device), f"the batch that {word} returned")
    require(
        ".py:" not in word,
        f"{word} returned a model alone, and its times are to be measured: return (model, (inputs, targets)) or "
        "(model, (inputs, targets), loss function)",
    )
    images = torch.randn(count, 3, pixels, pixels, device=device)
    labels = torch.randint(CLASSES, (count,), device=device)

    def run(model: nn.Module, samples: int) -> Tensor:
        return F.cross_entropy(model(images[:samples]), labels[:samples])

    return Sample(model, run, f"random images of {pixels} pixels")


def _own_loss(subject: Subject, count: int, device: torch.device) -> Callable[[nn.Module, int], Tensor]:
    batch = subject.sample_batch
    require(
        isinstance(batch, tuple | list) and len(batch) == 2,
        f"{subject.name} returned a sample batch of type {type(batch).__name__}: return (inputs, targets)",
    )
    inputs, targets = _part(batch[0], None, device), _part(batch[1], None, device)
    require(
        len(targets) >= count,
        f"{subject.name} returned {len(targets)} samples: return at least {count}, or give a smaller --local-batch",
    )

    def run(model: nn.Module, samples: int) -> Tensor:
        given, wanted = _part(inputs, samples, device), _part(targets, samples, device)
        output = model(**given) if isinstance(given, Mapping) else model(given)
        if subject.loss_fn is not None:
            return subject.loss_fn(output, wanted)
        return F.cross_entropy(getattr(output, "logits", output), wanted)

    return run


def _part(value: Any, samples: int | None, device: torch.device) -> Any:
    if isinstance(value, Mapping):
        return {key: _part(one, samples, device) for key, one in value.items()}
    return value[:samples].to(device)


def _masked_loss(count: int, length: int, device: torch.device) -> Callable[[nn.Module, int], Tensor]:
    """As the task `masked-lm` has it: scores of the masked tokens alone, and pairs of sentences if the network can."""
    words = torch.randint(5, VOCABULARY, (count, length), device=device)
    follows = torch.randint(2, (count,), device=device)
    masked = max(1, round(_MASKED * length))
    places = torch.rand(count, length, device=device).argsort(1)[:, :masked]

    def run(network: nn.Module, samples: int) -> Tensor:
        given, chosen = words[:samples], places[:samples]
        rows = (torch.arange(samples, device=device)[:, None] * length + chosen).flatten()
        with masked_lm.scored_tokens(network, rows):
            output = network(input_ids=given)
        pairs = getattr(output, "seq_relationship_logits", None)
        scores = output.logits if pairs is None else output.prediction_logits
        found = F.cross_entropy(scores, given.flatten()[rows])
        return found if pairs is None else found + F.cross_entropy(pairs, follows[:samples])

    return run
