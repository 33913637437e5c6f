"""The settings of an optimizer in a recipe: names and defaults come from its signature, meanings from its docstring.

Where a recipe differs from the signature, the registration of the optimizer says so. `betas` becomes two keys, `beta1`
and `beta2`. Arguments that no training needs (`foreach`, `capturable`, ...) become no key.
"""

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any

from torch_thor.training.errors import require

# Arguments that only select an implementation, and arguments that the application sets from other keys of a recipe
NO_SETTINGS = {
    "params", "model", "exclude", "foreach", "maximize", "capturable", "differentiable", "fused",
    "decoupled_weight_decay",
}  # fmt: skip
BETAS = ("beta1", "beta2")


@dataclass(frozen=True)
class OptimizerSettings:
    """The settings that every optimizer has.

    Args:
        lr: Learning rate, above 0.
        weight_decay: Coefficient of the weight decay; 0 switches it off. Each optimizer applies it in its own form.
    """

    lr: float = 0.1
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        require(0 < self.lr < math.inf, f"lr={self.lr} must be above 0")
        require(
            0 <= self.weight_decay < math.inf,
            f"weight_decay={self.weight_decay} must be 0 or more; 0 switches it off",
        )


def _check_decay(name: str, value: float) -> None:
    require(
        0 <= value < 1, f"{name}={value} must lie in [0, 1): it is the weight of the old value in a running average"
    )


def _check_not_negative(name: str, value: float) -> None:
    require(0 <= value < math.inf, f"{name}={value} must be 0 or more")


RULES: dict[str, Callable[[str, float], None]] = {
    **dict.fromkeys(("momentum", "alpha", "rho", *BETAS), _check_decay),
    **dict.fromkeys(("lr_decay", "initial_accumulator_value", "eps"), _check_not_negative),
}
# Meanings where torch's docstrings describe something else than the key of a recipe
TORCH_MEANINGS = {
    "lr": "Learning rate, above 0.",
    "lr_decay": "Decay of the learning rate: step t, counted from 0, uses lr / (1 + t · lr_decay).",
    "momentum": "Momentum factor in [0, 1); 0 switches momentum off.",
    "nesterov": "Whether momentum is Nesterov's; it needs a momentum above 0.",
    "alpha": "Decay of the running average of squared gradients.",
    "centered": "Whether the gradient is normalised by an estimate of its variance (centered RMSProp).",
    "rho": "Decay of the running average of squared gradients.",
    "beta1": "Decay of the running average of the gradient.",
    "beta2": "Decay of the running average of the squared gradient.",
    "eps": "Term added to the denominator for numerical stability.",
    "amsgrad": "Whether to use the AMSGrad variant (Reddi et al., ICLR 2018).",
    "weight_decay": "Coefficient of the weight decay, added to the gradient (L2 penalty); 0 switches it off.",
}


def settings_of(
    name: str,
    optimizer: Callable[..., Any],
    *,
    module: str,
    without: Sequence[str] = (),
    rules: Sequence[str] = tuple(RULES),
    check: Callable[[Any], None] | None = None,
    types: Mapping[str, Any] | None = None,
    meanings: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    summary: str | None = None,
) -> type[OptimizerSettings]:
    """Make the dataclass of an optimizer's settings.

    Args:
        name: The name of the class.
        optimizer: The optimizer, whose signature and docstring are read.
        module: The module that has the class under this name.
        without: Arguments that do not become keys, in addition to those of `NO_SETTINGS`.
        rules: Keys whose values `RULES` checks. The optimizer checks the others when it is made.
        check: A further check of the settings; it raises a `UserError`.
        types: Types of keys whose defaults do not show them.
        meanings: Meanings of keys that replace those of the docstring.
        defaults: Defaults that replace those of the signature.
        summary: First line of the class's docstring; `None` names the optimizer.

    Returns:
        A frozen dataclass with `lr` and `weight_decay` first, then the other keys in the order of the signature.
    """
    given = _arguments(optimizer, {*NO_SETTINGS, *without}) | dict(defaults or {})
    checked = [key for key in given if key in rules and key in RULES]

    def check_all(self: OptimizerSettings) -> None:
        OptimizerSettings.__post_init__(self)
        for key in checked:
            RULES[key](key, getattr(self, key))
        if check is not None:
            check(self)

    ordered = ["lr", "weight_decay", *(key for key in given if key not in ("lr", "weight_decay"))]
    kinds = {key: (types or {}).get(key) or _type(given[key]) for key in ordered}
    items = [(key, kinds[key], _default(given[key], kinds[key])) for key in ordered]
    documented = documented_arguments(optimizer) | dict(meanings or {})
    lines = [f"    {key}: {documented[key]}" for key in ordered]
    namespace = {
        "__post_init__": check_all,
        "__doc__": "\n".join([f"{summary or f'Settings of `{_name(optimizer)}`.'}\n", "Args:", *lines]),
    }
    made = make_dataclass(name, items, bases=(OptimizerSettings,), frozen=True, namespace=namespace)
    made.__module__ = module
    return made


def _name(optimizer: Callable[..., Any]) -> str:
    return str(getattr(optimizer, "__name__", optimizer))


def _arguments(optimizer: Callable[..., Any], left_out: set[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, argument in inspect.signature(optimizer).parameters.items():
        if name == "betas":
            found.update(zip(BETAS, argument.default, strict=True))
        elif name not in left_out:
            found[name] = argument.default
    return found


def _type(default: Any) -> Any:
    if isinstance(default, bool | str):
        return type(default)
    return float | None if default is None else float


def _default(value: Any, kind: Any) -> Any:
    if isinstance(value, dict):
        return field(default_factory=lambda: dict(value))
    return float(value) if kind is float else value


def documented_arguments(documented: Any) -> dict[str, str]:
    """Read the descriptions of arguments in a docstring, in torch's form or in Google's.

    Args:
        documented: The class.

    Returns:
        The description of each argument, without markup and without the default. That of `betas` is also that of
        `beta1` and `beta2`.
    """
    lines = inspect.cleandoc(documented.__doc__ or "").splitlines()
    begin = next(place for place, line in enumerate(lines) if line.strip() == "Args:")
    indent = len(lines[begin]) - len(lines[begin].lstrip()) + 4
    found: dict[str, str] = {}
    latest = ""
    for line in lines[begin + 1 :]:
        here = len(line) - len(line.lstrip())
        if line.strip() and here < indent:
            break
        entry = re.match(r"\s*(\w+)(?: \([^)]*\))? ?: ?(.*)", line) if here == indent else None
        if entry is not None:
            latest, rest = entry[1], entry[2]
            found[latest] = rest
        elif line.strip():
            found[latest] += f" {line.strip()}"
    sentences = {name: _sentence(text) for name, text in found.items()}
    if "betas" in sentences:
        sentences |= dict.fromkeys(BETAS, sentences["betas"])
    return sentences


def _sentence(text: str) -> str:
    plain = re.sub(r":\w+:`~?([^`]*)`", r"\1", " ".join(text.split())).replace("`", "")
    plain = re.sub(r"\s*\(default: [^)]*\)?\)", "", plain)
    plain = re.sub(r"\bNone\b", "`None`", plain).strip().rstrip(".")
    return f"{plain[0].upper() if plain[0].isascii() else plain[0]}{plain[1:]}."


def settings_dict(settings: OptimizerSettings) -> dict[str, Any]:
    """Return the settings as the keyword arguments of their optimizer.

    Args:
        settings: The settings of any optimizer.

    Returns:
        The arguments; `beta1` and `beta2` are the pair `betas`.
    """
    options = {item.name: getattr(settings, item.name) for item in fields(settings)}
    if set(BETAS) <= options.keys():
        options["betas"] = tuple(options.pop(name) for name in BETAS)
    return options
