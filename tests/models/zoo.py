"""Fifteen models that nobody here wrote, small ones with random weights, and real data for each.

Two are the MNIST and VAE examples of pytorch/examples, the rest come from torchvision, timm and
transformers. Images are scikit-learn's digits, text is what every Python carries.
"""

import pydoc_data.topics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import timm
import torch
import transformers
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torchvision.models import resnet18

VOCABULARY = 128  # text is ASCII, a character is a token
MASK = 127  # no character of a text


@dataclass(frozen=True)
class Subject:
    """A model, the function (model, batch) → loss, and the batches that there are."""

    model: nn.Module
    criterion: Callable
    batches: Sequence

    def loss(self, number=0):
        """The loss of a batch; after the last batch comes the first."""
        return self.criterion(self.model, self.batches[number % len(self.batches)])


@cache
def digits(count, pixels, channels, mean, deviation):
    """scikit-learn's digits, normalised, and their labels, in full batches of `count` images."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    images = (F.interpolate(images, size=(pixels, pixels), mode="bilinear") - mean) / deviation
    images = images.expand(-1, channels, -1, -1).contiguous()
    batches = zip(images.split(count), torch.tensor(found.target).split(count), strict=True)
    return [batch for batch in batches if len(batch[0]) == count]


@cache
def text(count=16, length=32):
    """The first characters of Python's own help texts: 64 batches of (count, length)."""
    topics = pydoc_data.topics.topics
    characters = "".join(topics[key] for key in sorted(topics)).encode("ascii", "ignore")
    tokens = torch.tensor(list(characters[: 64 * count * length])).view(64, count, length)
    return [(batch,) for batch in tokens]


class MNISTNet(nn.Module):
    """The network of pytorch/examples' `mnist`."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


class VAE(nn.Module):
    """The network of pytorch/examples' `vae`."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(784, 400)
        self.fc21 = nn.Linear(400, 20)
        self.fc22 = nn.Linear(400, 20)
        self.fc3 = nn.Linear(20, 400)
        self.fc4 = nn.Linear(400, 784)

    def forward(self, x):
        """The reconstruction, and mean and log variance of the code."""
        h = F.relu(self.fc1(x.view(-1, 784)))
        mean, log_variance = self.fc21(h), self.fc22(h)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mean, log_variance


def mnist():
    batches = digits(64, 28, 1, 0.1307, 0.3081)
    return Subject(MNISTNet(), lambda model, batch: F.nll_loss(model(batch[0]), batch[1]), batches)


def vae():
    def loss(model, batch):
        # both terms are sums over the batch, as the example has them
        found, mean, log_variance = model(batch[0])
        divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        pixels = batch[0].view(-1, 784)
        return F.binary_cross_entropy(found, pixels, reduction="sum") + divergence

    return Subject(VAE(), loss, digits(128, 28, 1, 0.0, 1.0))


def images(model):
    return Subject(
        model,
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        digits(32, 32, 3, 0.5, 0.5),
    )


def language(name, kind=transformers.AutoModelForCausalLM, **options):
    config = transformers.AutoConfig.for_model(name, vocab_size=VOCABULARY, **options)
    model = kind.from_config(config)
    return Subject(
        model, lambda model, batch: model(input_ids=batch[0], labels=batch[0]).loss, text()
    )


def masked(name, **options):
    config = transformers.AutoConfig.for_model(name, vocab_size=VOCABULARY, **options)
    model = transformers.AutoModelForMaskedLM.from_config(config)
    draws = torch.Generator().manual_seed(7)
    batches = []
    for (tokens,) in text():
        hidden = torch.rand(tokens.shape, generator=draws) < 0.15
        batches.append((tokens.masked_fill(hidden, MASK), tokens.masked_fill(~hidden, -100)))
    mask = torch.ones_like(batches[0][0])  # left out, transformers warns that tokens may be padding
    return Subject(
        model,
        lambda model, batch: model(input_ids=batch[0], labels=batch[1], attention_mask=mask).loss,
        batches,
    )


SMALL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "max_position_embeddings": 64,
}  # fmt: skip
# the options of some models
OPTIONS = {
    "vit": {"img_size": 32, "patch_size": 8, "depth": 4, "embed_dim": 96, "num_heads": 3},
    "swin": {
        "img_size": 32, "window_size": 4, "patch_size": 2, "embed_dim": 32, "depths": (1, 1, 2),
        "num_heads": (2, 4, 8),
    },
    "gpt2": {
        "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
        "eos_token_id": 1,
    },
    "t5": {
        "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 0,
    },
    "mamba": {"hidden_size": 64, "state_size": 8, "num_hidden_layers": 2},
    "deberta_v2": {
        "relative_attention": True, "position_buckets": 16, "norm_rel_ebd": "layer_norm",
        "share_att_key": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False,
    },
}  # fmt: skip


def from_timm(name, **options):
    return images(timm.create_model(name, num_classes=10, **options))


SUBJECTS = {
    "mnist": mnist,
    "vae": vae,
    "resnet18": lambda: images(resnet18(num_classes=10)),
    "vit": lambda: from_timm("vit_tiny_patch16_224", **OPTIONS["vit"]),
    "swin": lambda: from_timm("swin_tiny_patch4_window7_224", **OPTIONS["swin"]),
    "efficientnet": lambda: from_timm("efficientnet_b0"),
    "convnext": lambda: from_timm("convnext_atto", depths=(1, 1, 3, 1)),
    "nf_resnet26": lambda: from_timm("nf_resnet26"),
    "bert": lambda: masked("bert", **SMALL),
    "gpt2": lambda: language("gpt2", **OPTIONS["gpt2"]),
    "albert": lambda: masked("albert", **SMALL, embedding_size=32),
    "llama": lambda: language("llama", **SMALL),
    "t5": lambda: language("t5", transformers.AutoModelForSeq2SeqLM, **OPTIONS["t5"]),
    "mamba": lambda: language("mamba", **OPTIONS["mamba"]),
    "deberta_v2": lambda: masked("deberta-v2", **SMALL, **OPTIONS["deberta_v2"]),
}


def build(name, seed=0):
    """A subject whose random weights are drawn from the seed, its model in training mode."""
    torch.manual_seed(seed)
    subject = SUBJECTS[name]()
    subject.model.train()
    return subject


def train(subject, optimizer, steps=12, seed=0, *, fresh=False):
    """Train on the first batch, or on a `fresh` batch in each step.

    Returns the loss of each step, before the step, and of a further batch after the last step.
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
