"""Twenty-six further models of other projects, which the extras bench and trainers install."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo import VOCABULARY, Batch, Subject, _images, _language, _masked, digits, text


class Recurrent(nn.Module):
    """A character model with a recurrent layer."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(64, VOCABULARY)
        self.layers = kind(32, 64, num_layers=2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next characters."""
        return self.head(self.layers(self.embedding(tokens))[0])


def _recurrent(kind: type[nn.LSTM] | type[nn.GRU]) -> Subject:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0][:, :-1]).flatten(0, 1), batch[0][:, 1:].flatten())

    return Subject(Recurrent(kind), loss, text(16, 32))


def _graph(name: str) -> Subject:
    """Node classification on Zachary's karate club, which PyTorch Geometric contains."""
    import torch_geometric.nn as graphs
    from torch_geometric.datasets import KarateClub

    data = KarateClub()[0]
    model = getattr(graphs, name)(
        data.num_features, hidden_channels=16, num_layers=2, out_channels=4
    )
    return Subject(
        model,
        lambda model, batch: F.cross_entropy(model(*batch), data.y),
        [(data.x, data.edge_index)],
    )


def _detection() -> Subject:
    """The digit on a larger image is what is to be found."""
    from torchvision.models.detection import ssdlite320_mobilenet_v3_large

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        images = F.pad(batch[0], (16, 16, 16, 16))
        boxes = torch.tensor([[16.0, 16.0, 48.0, 48.0]])
        targets = [{"boxes": boxes, "labels": label.view(1) + 1} for label in batch[1]]
        return sum(model(list(images), targets).values(), torch.zeros(()))

    model = ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=11)
    return Subject(model, loss, digits(4, 32, 3, 0.5, 0.5))


def _diffusion() -> Subject:
    """Predict the noise of a step of the diffusion."""
    from diffusers import DDPMScheduler, UNet2DModel

    schedule = DDPMScheduler()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        noise, times = torch.randn_like(batch[0]), torch.randint(1000, (len(batch[0]),))
        return F.mse_loss(model(schedule.add_noise(batch[0], noise, times), times).sample, noise)

    blocks = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    model = UNet2DModel(
        sample_size=16,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(32, 64),
        **blocks,
    )
    return Subject(model, loss, digits(16, 16, 1, 0.5, 0.5))


def _timm(name: str) -> Subject:
    import timm

    return _images(timm.create_model(name, num_classes=10))


SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
CAUSAL = {
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "gpt_neox": {},
    "bloom": {"n_layer": 2, "n_head": 4},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "gemma": {"num_key_value_heads": 2, "head_dim": 16},
    "phi": {},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
}
MASKED = {
    "distilbert": {"dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4},
    "electra": {},
    "mpnet": {},
}


def _transformer(kind: str) -> Subject:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    config = AutoConfig.for_model(kind, **SIZES, **{**CAUSAL, **MASKED}[kind])
    if kind in CAUSAL:
        return _language(AutoModelForCausalLM.from_config(config))
    return _masked(AutoModelForMaskedLM.from_config(config))


TIMM = (
    "resnet10t", "regnetx_002", "mobilenetv2_050", "ghostnet_050", "edgenext_xx_small", "repvgg_a0",
    "lcnet_050",
    "tinynet_e", "dla46_c",
)  # fmt: skip
MORE: dict[str, Callable[[], Subject]] = {
    **{name: partial(_timm, name) for name in TIMM},
    **{name: partial(_transformer, name) for name in (*CAUSAL, *MASKED)},
    **{name: partial(_graph, name) for name in ("GCN", "GAT", "GraphSAGE")},
    "lstm": lambda: _recurrent(nn.LSTM),
    "gru": lambda: _recurrent(nn.GRU),
    "ssdlite": _detection,
    "diffusion": _diffusion,
}
