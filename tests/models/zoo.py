"""Sixteen models that nobody here wrote, small ones with random weights, and real data for each.

Two are the MNIST and VAE examples of pytorch/examples, the rest come from torchvision, timm and
transformers. Images are scikit-learn's digits, text is what every Python carries.
"""

import pydoc_data.topics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, ...]

VOCABULARY = 128  # text is ASCII, a character is a token
MASK = 127  # no character of a text


@dataclass(frozen=True)
class Subject:
    """A model and its training.

    Args:
        model: the model, in training mode.
        criterion: computes the loss of a batch.
        batches: what there is to train on, the same for all.
    """

    model: nn.Module
    criterion: Callable[[nn.Module, Batch], Tensor]
    batches: Sequence[Batch]

    def loss(self, number: int = 0) -> Tensor:
        """Return the loss of a batch; after the last comes the first."""
        return self.criterion(self.model, self.batches[number % len(self.batches)])


@cache
def digits(count: int, pixels: int, channels: int, mean: float, deviation: float) -> list[Batch]:
    """Return scikit-learn's digits, normalised, and their labels, in batches of ``count`` images.

    Those that do not fill a batch are left out.
    """
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    images = (F.interpolate(images, size=(pixels, pixels), mode="bilinear") - mean) / deviation
    images = images.expand(-1, channels, -1, -1).contiguous()
    labels = torch.tensor(found.target)
    return [
        (images[i : i + count], labels[i : i + count])
        for i in range(0, len(labels) - count + 1, count)
    ]


@cache
def text(count: int, length: int) -> list[Batch]:
    """Return the first characters of Python's own help texts: 64 batches of ``(count, length)``."""
    topics = pydoc_data.topics.topics
    characters = "".join(topics[key] for key in sorted(topics)).encode("ascii", "ignore")
    return [
        (batch,)
        for batch in torch.tensor(list(characters[: 64 * count * length])).view(64, count, length)
    ]


class MNISTNet(nn.Module):
    """The network of pytorch/examples' ``mnist``.

    Two convolutions and two linear layers, with dropout between them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logarithms of the probabilities."""
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


class VAE(nn.Module):
    """The network of pytorch/examples' ``vae``."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, 400)
        self.fc21 = nn.Linear(400, 20)
        self.fc22 = nn.Linear(400, 20)
        self.fc3 = nn.Linear(20, 400)
        self.fc4 = nn.Linear(400, 784)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the reconstruction, and mean and log variance of the code."""
        h = F.relu(self.fc1(x.view(-1, 784)))
        mean, log_variance = self.fc21(h), self.fc22(h)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mean, log_variance


def _mnist() -> Subject:
    batches = digits(64, 28, 1, 0.1307, 0.3081)
    return Subject(MNISTNet(), lambda model, batch: F.nll_loss(model(batch[0]), batch[1]), batches)


def _vae_loss(model: nn.Module, batch: Batch) -> Tensor:
    # both terms are sums over the batch, as the example has them
    reconstruction, mean, log_variance = model(batch[0])
    divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
    return (
        F.binary_cross_entropy(reconstruction, batch[0].view(-1, 784), reduction="sum") + divergence
    )


def _vae() -> Subject:
    return Subject(VAE(), _vae_loss, digits(128, 28, 1, 0.0, 1.0))


def _images(model: nn.Module) -> Subject:
    return Subject(
        model,
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        digits(32, 32, 3, 0.5, 0.5),
    )


def _resnet18() -> Subject:
    from torchvision.models import resnet18

    return _images(resnet18(num_classes=10))


def _mobilenet_v3() -> Subject:
    from torchvision.models import mobilenet_v3_small

    return _images(mobilenet_v3_small(num_classes=10))


def _timm(name: str, **options: Any) -> Subject:
    import timm

    return _images(timm.create_model(name, num_classes=10, **options))


def _vit() -> Subject:
    return _timm(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=4, embed_dim=96, num_heads=3
    )


def _swin() -> Subject:
    return _timm(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, patch_size=2,
        embed_dim=32, depths=(1, 1, 2), num_heads=(2, 4, 8),
    )  # fmt: skip


def _efficientnet() -> Subject:
    return _timm("efficientnet_b0")


def _convnext() -> Subject:
    return _timm("convnext_atto", depths=(1, 1, 3, 1))


def _nf_resnet26() -> Subject:
    return _timm("nf_resnet26")


def _language(model: nn.Module) -> Subject:
    return Subject(
        model, lambda model, batch: model(input_ids=batch[0], labels=batch[0]).loss, text(16, 32)
    )


def _masked(model: nn.Module) -> Subject:
    draws = torch.Generator().manual_seed(7)
    batches = []
    for (tokens,) in text(16, 32):
        hidden = torch.rand(tokens.shape, generator=draws) < 0.15
        batches.append((tokens.masked_fill(hidden, MASK), tokens.masked_fill(~hidden, -100)))
    mask = torch.ones_like(batches[0][0])  # left out, transformers warns that tokens may be padding
    return Subject(
        model,
        lambda model, batch: model(input_ids=batch[0], labels=batch[1], attention_mask=mask).loss,
        batches,
    )


_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def _config_of(kind: type, **options: Any) -> Any:
    """Make a configuration with options that its signature lacks, but takes."""
    return kind(**options)


def _bert() -> Subject:
    from transformers import BertConfig, BertForMaskedLM

    return _masked(
        BertForMaskedLM(BertConfig(**_SMALL, intermediate_size=128, max_position_embeddings=64))
    )


def _gpt2() -> Subject:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=64,
        bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return _language(GPT2LMHeadModel(config))


def _albert() -> Subject:
    from transformers import AlbertConfig, AlbertForMaskedLM

    config = AlbertConfig(
        **_SMALL, embedding_size=32, intermediate_size=128, max_position_embeddings=64
    )
    return _masked(AlbertForMaskedLM(config))


def _llama() -> Subject:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _language(
        LlamaForCausalLM(LlamaConfig(**_SMALL, intermediate_size=128, max_position_embeddings=64))
    )


def _t5() -> Subject:
    from transformers import T5Config, T5ForConditionalGeneration

    size = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    config = _config_of(T5Config, vocab_size=VOCABULARY, **size, decoder_start_token_id=0)
    return _language(T5ForConditionalGeneration(config))


def _mamba() -> Subject:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=64, state_size=8, num_hidden_layers=2)
    return _language(MambaForCausalLM(config))


def _deberta_v2() -> Subject:
    from transformers import DebertaV2Config, DebertaV2ForMaskedLM

    config = _config_of(
        DebertaV2Config, **_SMALL, intermediate_size=128, max_position_embeddings=64,
        relative_attention=True, position_buckets=16, norm_rel_ebd="layer_norm", share_att_key=True,
        pos_att_type=["p2c", "c2p"], position_biased_input=False,
    )  # fmt: skip
    return _masked(DebertaV2ForMaskedLM(config))


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "mnist": _mnist,
    "vae": _vae,
    "resnet18": _resnet18,
    "vit": _vit,
    "swin": _swin,
    "efficientnet": _efficientnet,
    "convnext": _convnext,
    "nf_resnet26": _nf_resnet26,
    "mobilenet_v3": _mobilenet_v3,
    "bert": _bert,
    "gpt2": _gpt2,
    "albert": _albert,
    "llama": _llama,
    "t5": _t5,
    "mamba": _mamba,
    "deberta_v2": _deberta_v2,
}


def build(name: str, seed: int = 0) -> Subject:
    """Return a model and its loss.

    Args:
        name: a key of ``SUBJECTS``.
        seed: of its random weights.

    Returns:
        The subject, its model in training mode.
    """
    torch.manual_seed(seed)
    subject = SUBJECTS[name]()
    subject.model.train()
    return subject


def train(
    subject: Subject,
    optimizer: torch.optim.Optimizer,
    steps: int = 12,
    seed: int = 0,
    *,
    fresh: bool = False,
) -> list[float]:
    """Train, on the subject's first batch or on a fresh one in each step.

    Args:
        subject: the model and its data.
        optimizer: its optimizer.
        steps: how many.
        seed: of dropout and sampling.
        fresh: whether each step has a batch of its own.

    Returns:
        The loss of each step, before the step, and the one of a further batch after the last:
        ``steps + 1`` numbers.
    """
    torch.manual_seed(seed)
    losses = []
    for step in range(steps):
        loss = subject.loss(step if fresh else 0)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses.append(float(subject.loss(steps if fresh else 0)))
    return losses
