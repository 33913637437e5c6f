"""Fourteen models that nobody here wrote, small and with random weights, and real data for each.

One is the VAE of pytorch/examples, the rest come from torchvision, timm and transformers. Images
are scikit-learn's digits, text is what every Python carries.
"""

import pydoc_data.topics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import timm
import torch
import transformers
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torchvision.models import resnet18

VOCABULARY = 128  # text is ASCII, a character is a token
MASK = 127  # no character of a text


@dataclass(frozen=True)
class Subject:
    """A model, the function (model, batch) → loss, and a batch."""

    model: nn.Module
    criterion: Callable
    batch: Any

    def loss(self):
        return self.criterion(self.model, self.batch)

    @property
    def samples(self):
        return len(tree_leaves(self.batch)[0])


@cache
def digits(count, pixels, channels, mean, deviation):
    """The first of scikit-learn's digits, normalised, and their labels."""
    found = load_digits()
    images = torch.tensor(found.images[:count], dtype=torch.float32)[:, None] / 16
    images = (F.interpolate(images, size=(pixels, pixels), mode="bilinear") - mean) / deviation
    return images.expand(-1, channels, -1, -1).contiguous(), torch.tensor(found.target[:count])


@cache
def text(count=16, length=32):
    """The first characters of Python's own help texts."""
    topics = pydoc_data.topics.topics
    characters = "".join(topics[key] for key in sorted(topics)).encode("ascii", "ignore")
    return torch.tensor(list(characters[: count * length])).view(count, length)


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
    return Subject(model, lambda model, x: model(input_ids=x, labels=x).loss, text())


def masked(name, **options):
    config = transformers.AutoConfig.for_model(name, vocab_size=VOCABULARY, **options)
    model = transformers.AutoModelForMaskedLM.from_config(config)
    tokens = text()
    hidden = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(7)) < 0.15
    batch = {
        "input_ids": tokens.masked_fill(hidden, MASK),
        "labels": tokens.masked_fill(~hidden, -100),
        "attention_mask": torch.ones_like(tokens),  # else transformers warns of padding
    }
    return Subject(model, lambda model, batch: model(**batch).loss, batch)


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


def train(subject, optimizer, steps):
    """The loss of each step on the first batch, before the step, and the loss after the last."""
    torch.manual_seed(0)
    losses = []
    for _ in range(steps):
        loss = subject.loss()
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses.append(float(subject.loss()))
    return losses
