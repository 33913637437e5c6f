"""Masked language models of transformers with random weights.

They are BERT in common sizes, or any model by its config file.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.errors import UserError, first_line

# Devlin et al. 2019; Turc et al. 2019 for tiny and mini
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
BERTS = {
    "bert-tiny": (2, 128, 2, 512),
    "bert-mini": (4, 256, 4, 1024),
    "bert-base": (12, 768, 12, 3072),
    "bert-large": (24, 1024, 16, 4096),
}
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
        UserError: If the file describes a network with too few positions.
    """
    import transformers

    if name in BERTS:
        sizes: Any = dict(zip(_SIZES, BERTS[name], strict=True))
        config = transformers.BertConfig(
            vocab_size=vocab_size,
            max_position_embeddings=max(512, length),  # the published models have 512
            pad_token_id=pad,
            **sizes,
        )
        return (
            transformers.BertForPreTraining(config)
            if next_sentence
            else transformers.BertForMaskedLM(config)
        )
    values: dict[str, Any] = json.loads(Path(name).read_text(encoding="utf-8"))
    values |= {"vocab_size": vocab_size, "pad_token_id": pad}
    model: nn.Module = transformers.AutoModelForMaskedLM.from_config(  # type: ignore[no-untyped-call]
        transformers.AutoConfig.for_model(**values)
    )
    try:
        model.eval()(torch.full((1, length), (pad + 1) % vocab_size))
    except (IndexError, RuntimeError) as error:
        raise UserError(
            f"model={name} cannot take the {length} tokens of an example ({first_line(error)}): "
            f"set max_position_embeddings to {length} or more in the file (for RoBERTa and its "
            f"like, which count from above padding, {length + pad + 1}), or lower data.text.length"
        ) from error
    return model.train()


def scored_tokens(model: nn.Module, rows: Tensor) -> Any:
    """Let a network score selected tokens only: a hook selects the inputs of its output layer.

    The scores are a product with the whole vocabulary, which takes most of the time of a step in
    small networks, and only masked tokens need them.

    Args:
        model: A masked language model of transformers, or its distributed wrapper; it must not be
            compiled.
        rows: The numbers of the tokens in the flattened batch, whose logits are (tokens,
            vocabulary).

    Returns:
        The handle of the hook, at the end of whose context it is removed.
    """
    inner: Any = getattr(model, "module", model)
    return inner.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: (inputs[0].flatten(0, 1)[rows],)
    )
