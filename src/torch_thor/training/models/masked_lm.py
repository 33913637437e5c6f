"""Masked language models of transformers with random weights: BERT in common sizes, or any model by its config file."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from torch_thor.training.errors import UserError, require

# layers, hidden size, attention heads, feed-forward width (Devlin et al. 2019; Turc et al. 2019 for tiny and mini)
BERTS = {
    "bert-tiny": (2, 128, 2, 512),
    "bert-mini": (4, 256, 4, 1024),
    "bert-base": (12, 768, 12, 3072),
    "bert-large": (24, 1024, 16, 4096),
}
CONFIG = ".json"
_POSITIONS = 512  # number of positions of the published BERT models


def is_known(name: str) -> bool:
    """Check whether the `model` of a recipe can be a masked language model.

    Args:
        name: The `model` of the recipe.

    Returns:
        True if it is a size of BERT or the name of a configuration file.
    """
    return name in BERTS or name.endswith(CONFIG)


def takes_pairs(name: str) -> bool:
    """Check whether a network is trained on pairs of text segments, as BERT is.

    Args:
        name: The `model` of the recipe.

    Returns:
        True for the sizes of BERT. A network from a configuration file is trained on masked tokens only.
    """
    return name in BERTS


def build(name: str, vocab_size: int, length: int, pad: int, *, next_sentence: bool = True) -> nn.Module:
    """Build a network with random weights from torch's global generator.

    Args:
        name: A size of BERT, or the path of a transformers configuration file (`config.json`) with a `model_type`.
        vocab_size: Number of word pieces of the corpus; overrides the value of a configuration file.
        length: Maximum number of tokens in an example.
        pad: The token id of [PAD].
        next_sentence: Whether BERT has a head for next-sentence prediction; ignored for a configuration file.

    Returns:
        A `BertForPreTraining`, a `BertForMaskedLM` if the head is omitted, or the network that `AutoModelForMaskedLM`
        builds from the configuration file.

    Raises:
        UserError: If the file does not exist, does not describe a masked language model, or describes one with too few
            positions.
    """
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
        return transformers.BertForPreTraining(config) if next_sentence else transformers.BertForMaskedLM(config)
    file = Path(name)
    require(file.is_file(), f"model={name}: there is no such file; give {', '.join(BERTS)} or a config.json")
    try:
        values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        values |= {"vocab_size": vocab_size, "pad_token_id": pad}
        own = transformers.AutoConfig.for_model(**values)
        model: nn.Module = transformers.AutoModelForMaskedLM.from_config(own)  # type: ignore[no-untyped-call]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"model={name} describes no masked language model of transformers: {reason}") from error
    positions = getattr(own, "max_position_embeddings", None)
    first = _first_position(model)
    numbered = "" if first == 0 else f", numbered from {first}"
    require(
        positions is None or positions >= first + length,
        f"model={name} has {positions} positions{numbered}, and examples have {length} tokens: set "
        f"max_position_embeddings to {first + length} or more in the file, or lower data.text.length",
    )
    return model


def _first_position(model: nn.Module) -> int:
    """Return the position index of the first token.

    RoBERTa and related models (camembert, data2vec-text, esm, ibert, longformer, luke, mpnet, xlm-roberta, xmod, ...)
    count positions from the padding index plus one. Only these models have a position embedding with a padding index.
    """
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if name.rpartition(".")[2] == "position_embeddings" and padding is not None:
            return int(padding) + 1
    return 0


def checkpoint_activations(model: nn.Module, name: str) -> None:
    """Let a network of transformers recompute the activations within each layer in the backward pass.

    Args:
        model: The network.
        name: The `model` of the recipe, for the error message.

    Raises:
        UserError: If the network does not support it.
    """
    network: Any = model
    require(
        bool(getattr(network, "supports_gradient_checkpointing", False)),
        f"activation_checkpointing=true: {type(model).__name__} of model={name} does not support it; leave it false",
    )
    # transformers before 5.20 has only the second name
    enable = getattr(network, "activation_checkpointing_enable", None) or network.gradient_checkpointing_enable
    enable({"use_reentrant": False})


@contextmanager
def scored_tokens(model: nn.Module, rows: Tensor) -> Iterator[None]:
    """Let a network compute the scores of selected tokens only.

    Computing scores requires a product with the whole vocabulary, which takes most of the time of a step in small
    networks, and only masked tokens need scores. A hook selects the inputs of the output layer; the network itself is
    not changed.

    Args:
        model: A masked language model of transformers, or its distributed wrapper. The hook has no effect on a
            compiled network.
        rows: Indices of the tokens in the flattened batch: int64, (tokens,).

    Yields:
        None. Within the context, the network's logits have the shape (tokens, vocabulary) instead of
        (batch, length, vocabulary).
    """
    inner: Any = getattr(model, "module", model)
    output_layer: nn.Module = inner.get_output_embeddings()
    hook = output_layer.register_forward_pre_hook(lambda _, inputs: (inputs[0].flatten(0, 1)[rows],))
    try:
        yield
    finally:
        hook.remove()
