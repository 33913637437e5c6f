"""Masked language models of transformers with random weights.

They are BERT in common sizes, or any model by its config file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_thor.errors import explaining, first_line, require

if TYPE_CHECKING:  # recipes are checked without importing torch
    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

# layers, hidden size, attention heads, feed-forward width (Devlin et al. 2019; Turc et al. 2019 for
# tiny and mini)
BERTS = {
    "bert-tiny": (2, 128, 2, 512),
    "bert-mini": (4, 256, 4, 1024),
    "bert-base": (12, 768, 12, 3072),
    "bert-large": (24, 1024, 16, 4096),
}
_POSITIONS = 512  # number of positions of the published BERT models
CONFIGURATION = ".json"  # what the name of a configuration file ends in


def is_known(name: str) -> bool:
    """Whether the `model` of a recipe is a size of BERT or a configuration file."""
    return name in BERTS or name.endswith(CONFIGURATION)


def build(
    name: str, vocab_size: int, length: int, pad: int, *, next_sentence: bool = True
) -> nn.Module:
    """Build a network with random weights from torch's global generator.

    Args:
        name: A size of BERT, or the path of a transformers configuration file (`config.json`) with
            a `model_type`.
        vocab_size: Number of word pieces of the corpus; overrides the value of a configuration
            file.
        length: Maximum number of tokens in an example.
        pad: The token id of [PAD].
        next_sentence: Whether BERT has a head for next-sentence prediction; ignored for a
            configuration file.

    Returns:
        A `BertForPreTraining`, a `BertForMaskedLM`, or what `AutoModelForMaskedLM` builds from the
        configuration file.

    Raises:
        UserError: If the file describes no masked language model, or one with too few positions.
    """
    import torch
    import transformers

    if name in BERTS:
        layers, width, heads, inner = BERTS[name]
        config = transformers.BertConfig(
            vocab_size=vocab_size,
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=heads,
            intermediate_size=inner,
            max_position_embeddings=max(_POSITIONS, length),
            pad_token_id=pad,
        )
        return (
            transformers.BertForPreTraining(config)
            if next_sentence
            else transformers.BertForMaskedLM(config)
        )
    file = Path(name)
    require(
        file.is_file(),
        f"model={name}: there is no such file; give {', '.join(BERTS)} or a config.json",
    )
    with explaining(
        (ValueError, TypeError, KeyError, AttributeError),
        lambda error: (
            f"model={name} describes no masked language model of transformers: {first_line(error)}"
        ),
    ):
        values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        of_file = transformers.AutoConfig.for_model(
            **values | {"vocab_size": vocab_size, "pad_token_id": pad}
        )
        make: Any = transformers.AutoModelForMaskedLM.from_config
        model: nn.Module = make(of_file)
    with (
        explaining(
            (IndexError, RuntimeError),
            lambda error: (
                f"model={name} cannot take the {length} tokens of an example "
                f"({first_line(error)}): set max_position_embeddings to {length} or more in the "
                "file (for RoBERTa and its like, which count from above padding, "
                f"{length + pad + 1}), or lower data.text.length"
            ),
        ),
        torch.no_grad(),
    ):
        model.eval()(torch.full((1, length), (pad + 1) % vocab_size))
    return model.train()


def scored_tokens(model: nn.Module, rows: Tensor) -> RemovableHandle:
    """Let a network score selected tokens only: a hook selects the inputs of its output layer.

    The scores are a product with the whole vocabulary, which takes most of the time of a step in
    small networks, and only masked tokens need them.

    Args:
        model: A masked language model of transformers, or its distributed wrapper; it must not be
            compiled.
        rows: The numbers of the tokens in the flattened batch, whose logits are (tokens,
            vocabulary).

    Returns:
        The hook, at the end of whose context it is removed.
    """
    inner: Any = getattr(model, "module", model)
    hook: RemovableHandle = inner.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: (inputs[0].flatten(0, 1)[rows],)
    )
    return hook
