"""Masked language models of transformers, with random weights: BERT in its usual sizes, or any by its config file."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from torch_thor.training.errors import UserError, require

# layers, width, heads, width of the feed-forward layers (Devlin et al. 2019; Turc et al. 2019 for tiny and mini)
BERTS = {
    "bert-tiny": (2, 128, 2, 512),
    "bert-mini": (4, 256, 4, 1024),
    "bert-base": (12, 768, 12, 3072),
    "bert-large": (24, 1024, 16, 4096),
}
CONFIG = ".json"
_POSITIONS = 512  # of the published ones


def is_known(name: str) -> bool:
    """Say whether a recipe's `model` can be a masked language model.

    Args:
        name: What the recipe says.

    Returns:
        Whether it is a size of BERT, or the name of a configuration file.
    """
    return name in BERTS or name.endswith(CONFIG)


def takes_pairs(name: str) -> bool:
    """Say whether a network is trained on pairs of sentence runs, as BERT is.

    Args:
        name: What the recipe says.

    Returns:
        True for the sizes of BERT; a file's network is trained on its masked tokens alone.
    """
    return name in BERTS


def build(name: str, vocab_size: int, length: int, pad: int, *, next_sentence: bool = True) -> nn.Module:
    """Build a network with torch's global random numbers.

    Args:
        name: A size of BERT, or the file of a transformers configuration (`config.json`) with `model_type`.
        vocab_size: Word pieces of the corpus; takes the place of what a file says.
        length: Most tokens of an example.
        pad: The number of [PAD].
        next_sentence: Whether BERT has a head for next-sentence prediction; no network of a file has one.

    Returns:
        `BertForPreTraining`, without that head `BertForMaskedLM`, or what `AutoModelForMaskedLM` makes of the file.

    Raises:
        UserError: If the file cannot be read, describes no masked language model, or one with too few positions.
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
    """Return the number of the first token's position.

    RoBERTa and its relatives (camembert, data2vec-text, esm, ibert, longformer, luke, mpnet, xlm-roberta, xmod, ...)
    count positions from one above that of padding. Those, and no others, have a table of positions with a row for
    padding.
    """
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if name.rpartition(".")[2] == "position_embeddings" and padding is not None:
            return int(padding) + 1
    return 0


def checkpoint_activations(model: nn.Module, name: str) -> None:
    """Have a network of transformers compute the activations inside of each layer again in the backward pass.

    Args:
        model: The network.
        name: What the recipe calls it, for the error.

    Raises:
        UserError: If the network cannot.
    """
    network: Any = model
    require(
        bool(getattr(network, "supports_gradient_checkpointing", False)),
        f"activation_checkpointing=true: {type(model).__name__} of model={name} does not support it; leave it false",
    )
    # the second name is that of transformers before 5.20
    enable = getattr(network, "activation_checkpointing_enable", None) or network.gradient_checkpointing_enable
    enable({"use_reentrant": False})


@contextmanager
def scored_tokens(model: nn.Module, rows: Tensor) -> Iterator[None]:
    """Let a network compute scores of some tokens alone.

    The scores are a product with the whole vocabulary: for small networks most of a step, and only masked tokens need
    them. The network itself stays as it is; a hook selects the inputs of its output layer.

    Args:
        model: A masked language model of transformers, or the distributed wrapper around one. A compiled network does
            not notice the hook.
        rows: Numbers of the tokens, counted through the whole batch: int64, (tokens,).

    Yields:
        While in the context, the network's logits are (tokens, vocabulary) instead of (batch, length, vocabulary).
    """
    inner: Any = getattr(model, "module", model)
    output_layer: nn.Module = inner.get_output_embeddings()
    hook = output_layer.register_forward_pre_hook(lambda _, inputs: (inputs[0].flatten(0, 1)[rows],))
    try:
        yield
    finally:
        hook.remove()
