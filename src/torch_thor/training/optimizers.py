"""The optimizers a recipe can name: keys are arguments of their classes, with equal defaults."""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, PlainValidator, create_model
from torch import Tensor, nn

from torch_thor.capture.patterns import selected
from torch_thor.distributed.data_parallel import Distributed
from torch_thor.errors import explaining, first_line, require
from torch_thor.intervals import as_interval
from torch_thor.optim import AGCSGD, LAMB, THOR, ThorMuon
from torch_thor.optim.options import OPTIONS
from torch_thor.optim.thor import PRESETS
from torch_thor.split.choice import choose_split_dim
from torch_thor.training.muon import MuonAdamW
from torch_thor.training.recipe_keys import Keys, NotNegative, Number, Positive, Rules, Share

AUTO = "auto"
_THRESHOLDS = {
    name: preset["trace_thresholds"] for name, preset in PRESETS.items() if len(preset) == 1
}


def _option(key: str, or_else: str, words: Collection[str] = ()) -> PlainValidator:
    """Check a value by the rule of the optimizer's option, or that it is one of some words."""

    def check(value: Any) -> Any:
        require(
            value in words if isinstance(value, str) else bool(OPTIONS[key].test(value)),
            f"must be {OPTIONS[key].rule}{or_else}{', '.join(words)}",
        )
        return tuple(map(float, value)) if isinstance(value, list | tuple) else value

    return PlainValidator(check)


def _checked_patterns(value: Any) -> Any:
    if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
        return tuple(value)
    require(
        value is None or isinstance(value, str),
        "must be a name, a pattern, or a list of them, such as ['*.weight', -head]",
    )
    return value


_Patterns = Annotated[str | tuple[str, ...] | None, PlainValidator(_checked_patterns)]
_AVERAGE = "weight of the old value in a running average of "
KEYS: dict[str, tuple[Any, str]] = {  # type and meaning; the documentation of the classes says more
    "lr": (Positive, "learning rate; null: thor-muon finds it from the weights"),
    "weight_decay": (NotNegative, "coefficient of the weight decay, in the optimizer's own form"),
    "damping": (Positive, "λ, added to the diagonal of the factors; see damping_schedule"),
    "momentum": (Share, "μ; 0 switches momentum off"),
    "nesterov": (bool, "Nesterov's momentum"),
    "update_interval": (
        Annotated[
            int | dict[str, Any],
            _option("update_interval", ", such as {kind: constant, interval: 5}"),
        ],
        "steps between refreshes, or {kind: constant, piecewise or geometric, ...} of "
        "torch_thor.intervals",
    ),
    "trace_thresholds": (
        Annotated[
            tuple[Number, Number] | str, _option("trace_thresholds", "; or one of ", _THRESHOLDS)
        ],
        "(ω1, ω2) of the trace rule, or thor, thor_stop, thor_nt",
    ),
    "split_dim": (
        Annotated[int | Literal["auto"] | None, _option("split_dim", "; or one of ", [AUTO])],
        "block size of the factors; null: whole ones; auto measures it at the start",
    ),
    "factor_decay": (Share, _AVERAGE + "the factors; 0: the latest only"),
    "max_update_ratio": (
        Positive | None,
        "largest step of a parameter relative to its norm; null: no bound",
    ),
    "kl_clip": (
        Positive | None,
        "bound κ on the squared step in the Fisher norm, in the place of max_update_ratio",
    ),
    "layers": (
        _Patterns,
        "layers whose curvature is used, by name or pattern; a leading minus leaves out",
    ),
    "fisher": (
        Literal["empirical", "sampled"],
        "labels of the statistics: those of the loss, or drawn ones",
    ),
    "dampening": (Share, "τ in v ← μ v + (1 − τ) d"),
    "dampen_first": (bool, "dampen the first step too"),
    "clip_factor": (Positive, "largest ratio of gradient to weight of a unit"),
    "lr_decay": (NotNegative, "step t uses lr / (1 + t · lr_decay)"),
    "initial_accumulator_value": (NotNegative, "start of the sum of squared gradients"),
    "alpha": (Share, _AVERAGE + "squared gradients"),
    "rho": (Share, _AVERAGE + "squared gradients"),
    "beta1": (Share, _AVERAGE + "the gradient"),
    "beta2": (Share, _AVERAGE + "the squared gradient"),
    "eps": (NotNegative, "term that keeps a denominator away from 0"),
    "centered": (bool, "normalise by the variance of the gradient"),
    "amsgrad": (bool, "the AMSGrad variant"),
    "adjust_lr_fn": (
        Literal["original", "match_rms_adamw"],
        "how lr depends on the shape of a matrix",
    ),
    "adamw_lr": (Positive | None, "learning rate of what is no matrix; null: lr"),
    "adamw_embeddings": (bool, "train embeddings with AdamW"),
    "exclude": (_Patterns, "parameters that are treated as biases are; null: biases and norms"),
    "decay_filter": (_Patterns, "parameters with weight decay, by name or pattern; null: all"),
    "divide_curvature": (bool, "each process keeps only the blocks that it inverts"),
}


_SGD = {"lr": 0.1, "momentum": 0.9}  # torch's lr=0.001 without momentum trains no image classifier
# the class, and where a recipe has other defaults
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], Mapping[str, Any]]] = {
    "thor-muon": (ThorMuon, {}),
    "thor": (THOR, {}),
    "sgd": (torch.optim.SGD, _SGD),
    "momentum": (torch.optim.SGD, _SGD),
    "nesterov": (torch.optim.SGD, {**_SGD, "nesterov": True}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
    "muon": (MuonAdamW, {"weight_decay": 0.01}),
    "lamb": (LAMB, {"lr": 0.01}),
    "agc-sgd": (AGCSGD, _SGD),
}


class OptimizerKeys(Keys):
    """The settings of an optimizer."""

    def rules(self) -> Rules:
        """Refuse Nesterov's momentum where the classes of torch and AGC-SGD refuse it."""
        own = self.model_dump(include={"nesterov", "momentum", "dampening", "dampen_first"})
        refuses = "dampening" in own and own["nesterov"]
        return (
            (
                refuses and not own["momentum"],
                f"momentum={own.get('momentum')} must be above 0 for nesterov=true: raise it, or "
                "set nesterov=false",
            ),
            (
                refuses and own["dampening"] and not own.get("dampen_first"),
                f"dampening={own.get('dampening')} must be 0 for nesterov=true: leave it out, or "
                "set nesterov=false",
            ),
        )


def _keys_of(name: str) -> type[OptimizerKeys]:
    kind, own = OPTIMIZERS[name]
    given = {
        key: argument.default for key, argument in inspect.signature(kind).parameters.items()
    } | dict(own)
    given["decay_filter"] = None
    if "betas" in given:
        given["beta1"], given["beta2"] = given["betas"]
    if "layers" in given:
        given["divide_curvature"] = False
    if "update_interval" in given:
        given["update_interval"] = as_interval(given["update_interval"])
    known: Any = {
        key: (hint if given[key] is not None else hint | None, Field(given[key], description=about))
        for key, (hint, about) in KEYS.items()
        if key in given
    }
    return create_model(name, __base__=OptimizerKeys, **known)


KEYS_OF = {name: _keys_of(name) for name in OPTIMIZERS}
_all: dict[str, Any] = {
    name: (own, Field(own(), description=f"settings of {name}")) for name, own in KEYS_OF.items()
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
    """Build an optimizer for all parameters of a model, with settings as a recipe gives them."""
    # `sample` measures the number for `split_dim=auto`, the same on all processes, as
    # `measured_split_dim` does on one. Without it the number is the default: a checkpoint will
    # bring its own.
    require(
        name in OPTIMIZERS,
        f"optimizer={name} is not an optimizer: use one of {', '.join(OPTIMIZERS)}",
    )
    kind, options = OPTIMIZERS[name][0], {**settings_of(name), **given}
    if "beta1" in options:
        options["betas"] = (options.pop("beta1"), options.pop("beta2"))
    if isinstance(preset := options.get("trace_thresholds"), str):
        options["trace_thresholds"] = _THRESHOLDS.get(preset, preset)
    if options.get("split_dim") == AUTO:
        options["split_dim"] = settings_of(name)["split_dim"] if sample is None else sample()
    if "model" in inspect.signature(kind).parameters:
        options["model"] = model
    decayed = options.pop("decay_filter")
    params: Any = model.parameters()
    # such as a pattern that matches no layer of this network
    with explaining((TypeError, ValueError), lambda error: f"optimizer {name}: {error}"):
        if "layers" in options:
            options["distributed"] = Distributed(divide_curvature=options.pop("divide_curvature"))
        if decayed is not None:
            named = dict(model.named_parameters())
            chosen = selected("decay_filter", decayed, named, "parameter")
            with_decay = [p for key, p in named.items() if key in chosen]
            without = [p for key, p in named.items() if key not in chosen]
            groups = {"params": with_decay}, {"params": without, "weight_decay": 0.0}
            params = [group for group in groups if group["params"]]
        return kind(params, **options)


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
    """Choose a block size for an optimizer by `choose_split_dim`."""
    # The loss is that of a network on the first batch of the training.
    with explaining(
        (ValueError, RuntimeError),
        lambda error: f"split_dim=auto: {first_line(error)}; give a number, such as 128",
    ):
        return choose_split_dim(_Itself(model), (), loss_fn=loss, optimizer=name).split_dim
