"""The optimizers a recipe can name: keys are arguments of their classes, with equal defaults."""

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, PlainValidator, create_model
from torch import Tensor, nn

from torch_thor.capture.patterns import selected
from torch_thor.errors import UserError
from torch_thor.intervals import as_saved
from torch_thor.optim import registry
from torch_thor.optim.options import OPTIONS
from torch_thor.optim.thor import PRESETS
from torch_thor.split import choose_split_dim
from torch_thor.training.muon import MuonAdamW
from torch_thor.training.recipe_keys import Keys, LayerParameter, NotNegative, Positive

AUTO = "auto"
_THRESHOLDS = {
    name: preset["trace_thresholds"] for name, preset in PRESETS.items() if len(preset) == 1
}
# These words stand for a value of an option.
_WORDS = {"trace_thresholds": tuple(_THRESHOLDS), "split_dim": (AUTO,)}


def _key(name: str) -> tuple[Any, str]:
    """Return the type of an option, which takes what its rule takes, and its meaning."""
    option, words = OPTIONS[name], _WORDS.get(name, ())

    def check(value: Any) -> Any:
        if not (option.test(value) or (isinstance(value, str) and value in words)):
            raise ValueError("; or one of ".join([f"must be {option.rule}", *words[:1]]))
        if option.type is float:
            return float(value)
        return tuple(value) if isinstance(value, list) else value

    hint = option.type | Literal[words] if words else option.type
    return Annotated[hint, PlainValidator(check)], option.meaning


_AVERAGE = "weight of the old value in a running average of "
# Each key has a type and a short meaning, because the documentation of the classes says more.
_KEYS: dict[str, tuple[Any, str]] = {
    **{
        name: _key(name)
        for name, option in OPTIONS.items()
        if option.type is not None and option.scope in ("group", "optimizer")
    },
    # It must be positive, because it is the highest of its schedule.
    "lr": (Positive, OPTIONS["lr"].meaning),
    "lr_decay": (NotNegative, "step t uses lr / (1 + t · lr_decay)"),
    "initial_accumulator_value": (NotNegative, "start of the sum of squared gradients"),
    "alpha": (LayerParameter, _AVERAGE + "squared gradients"),
    "rho": (LayerParameter, _AVERAGE + "squared gradients"),
    "beta1": (LayerParameter, _AVERAGE + "the gradient"),
    "beta2": (LayerParameter, _AVERAGE + "the squared gradient"),
    "centered": (bool, "normalise by the variance of the gradient"),
    "amsgrad": (bool, "the AMSGrad variant"),
    "adjust_lr_fn": (
        Literal["original", "match_rms_adamw"],
        "how lr depends on the shape of a matrix",
    ),
    "adamw_lr": (Positive | None, "learning rate of what is no matrix; null: lr"),
    "adamw_embeddings": (bool, "train embeddings with AdamW"),
    "decay_filter": (
        _key("exclude")[0],
        "parameters with weight decay, by name or pattern; null: all",
    ),
}


_SGD = {"lr": 0.1, "momentum": 0.9}  # torch's lr=0.001 without momentum trains no image classifier
_OTHERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": torch.optim.SGD,
    "nesterov": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adadelta": torch.optim.Adadelta,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "muon": MuonAdamW,
}
# A recipe has other defaults than the class for these options.
_DEFAULTS: dict[str, Mapping[str, Any]] = {
    **dict.fromkeys(("sgd", "momentum", "agc-sgd"), _SGD),
    "nesterov": {**_SGD, "nesterov": True},
    "muon": {"weight_decay": 0.01},
    "lamb": {"lr": 0.01},
}
OPTIMIZERS = {**registry.WITH_CURVATURE, **_OTHERS, **registry.OPTIMIZERS}


def keys_of(name: str) -> type[Keys]:
    """Return the keys of an optimizer: the options of its class, and the key that a recipe adds."""
    arguments = inspect.signature(OPTIMIZERS[name]).parameters
    given = {key: argument.default for key, argument in arguments.items()}
    given |= {**_DEFAULTS.get(name, {}), "decay_filter": None}
    if "betas" in given:
        given["beta1"], given["beta2"] = given["betas"]
    if "update_interval" in given:
        given["update_interval"] = as_saved(given["update_interval"])
    known: Any = {
        key: (hint if given[key] is not None else hint | None, Field(given[key], description=about))
        for key, (hint, about) in _KEYS.items()
        if key in given
    }
    return create_model(name, __base__=Keys, **known)


KEYS_OF = {name: keys_of(name) for name in OPTIMIZERS}
_all: dict[str, Any] = {
    name: (keys, Field(keys(), description=f"settings of {name}")) for name, keys in KEYS_OF.items()
}
Settings = create_model("Settings", __base__=Keys, **_all)


def settings_of(name: str) -> dict[str, Any]:
    """Return the default of each key of an optimizer."""
    return {key: field.get_default() for key, field in KEYS_OF[name].model_fields.items()}


def build_optimizer(
    name: str,
    model: nn.Module,
    given: Mapping[str, Any],
    *,
    sample: Callable[[], int] | None = None,
) -> torch.optim.Optimizer:
    """Build an optimizer for all parameters of a model, with settings as a recipe gives them.

    `sample` measures the number for `split_dim=auto`, the same on all processes, as
    `measured_split_dim` does on one. Without it the number is the default: a checkpoint will bring
    its own.

    Returns:
        The optimizer, before its first step.

    Raises:
        UserError: If the settings do not fit the model or each other.
    """
    kind, options = OPTIMIZERS[name], {**settings_of(name), **given}
    if "beta1" in options:
        options["betas"] = (options.pop("beta1"), options.pop("beta2"))
    if isinstance(preset := options.get("trace_thresholds"), str):
        options["trace_thresholds"] = _THRESHOLDS[preset]
    if options.get("split_dim") == AUTO:
        options["split_dim"] = settings_of(name)["split_dim"] if sample is None else sample()
    if "model" in inspect.signature(kind).parameters:
        options["model"] = model
    decayed = options.pop("decay_filter")
    try:
        return kind(_groups(model, decayed), **options)
    except (TypeError, ValueError) as error:  # such as a pattern that matches no layer
        raise UserError(f"optimizer {name}: {error}") from error


def _groups(model: nn.Module, decayed: Any) -> Any:
    """Return the parameters, or two groups where a filter leaves some without weight decay."""
    if decayed is None:
        return model.parameters()
    named = dict(model.named_parameters())
    chosen = selected("decay_filter", decayed, named, "parameter")
    with_decay = [p for key, p in named.items() if key in chosen]
    without = [p for key, p in named.items() if key not in chosen]
    groups = {"params": with_decay}, {"params": without, "weight_decay": 0.0}
    return [group for group in groups if group["params"]]


class _Itself(nn.Module):
    """Returns its network, so that the loss of the copy that is measured can be computed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> nn.Module:
        return self.model


def measured_split_dim(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], name: str = "thor"
) -> int:
    """Choose a block size by `choose_split_dim`, with a network's loss on its first batch."""
    return choose_split_dim(_Itself(model), (), loss_fn=loss, optimizer=name).split_dim
