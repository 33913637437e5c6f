"""What a recipe's mappings share: types, rules between keys, lines of errors, tables of keys."""

import re
import types
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

Whole = Annotated[int, Strict()]  # strict: true is no number, and the text "3" none either
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Count = Annotated[Whole, Field(ge=1)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
LayerParameter = Annotated[Number, Field(ge=0, lt=1)]

_WORDS = {
    int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "null",
    dict: "mapping",
    Any: "any",
}  # fmt: skip

Rules = Iterable[tuple[bool, str]]  # whether each is broken, and the line that says so


class Keys(BaseModel):
    """A mapping of a recipe. Each field is a key, and its description the meaning of the key."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)

    def rules(self) -> Rules:
        """Return the rules between keys; the lines begin with a key of this mapping."""
        return ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        # pydantic keeps one error of a mapping, so all rules are checked here
        if faults := [line for broken, line in self.rules() if broken]:
            raise PydanticCustomError("faults", "{lines}", {"lines": faults})
        return self


def nearest(name: str, names: Iterable[str]) -> str:
    """Return " (did you mean X?)" for the most similar name, or nothing if none is similar."""
    matches = get_close_matches(name, list(names), 1)
    return f" (did you mean {matches[0]}?)" if matches else ""


def lines_of(error: ValidationError, meanings: Mapping[str, str]) -> list[str]:
    """Describe each fault that pydantic has found in one line: key, value, rule and meaning."""
    return [line for fault in error.errors(include_url=False) for line in _lines(fault, meanings)]


def _lines(fault: ErrorDetails, meanings: Mapping[str, str]) -> list[str]:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"]]
    key = "".join(parts).removeprefix(".")
    meaning = meanings.get(re.sub(r"\[\d+\]", "", key))
    about = f" ({meaning})" if meaning else ""
    shown = f"{key}={in_yaml(fault['input'])[:80]}"
    match fault["type"]:
        case "faults":  # of `Keys._check`
            return [f"{key}.{line}".removeprefix(".") for line in fault["ctx"]["lines"]]
        case "extra_forbidden" if "." in str(fault["loc"][-1]):
            return [
                f"there is no key {key}: write levels in a file, as in schedule: {{kind: step}}"
            ]
        case "extra_forbidden" if meaning:
            return [f"{key} is a setting of optimizers: give it as optimizers.NAME.{key}"]
        case "extra_forbidden":
            return [f"there is no key {key}{nearest(key, meanings)}: `torch-thor keys` lists them"]
        case "missing":
            return [f"{key} is missing: give it{about}"]
        case "value_error":
            return [f"{shown}: {fault['ctx']['error']}{about}"]
    return [f"{shown} {fault['msg'].removeprefix('Input ')}{about}"]


def rows(model: type[BaseModel]) -> list[tuple[str, str, str, str]]:
    """Return key, type, default and meaning of each key of a mapping, in words and in YAML."""
    return [
        (
            name,
            _type(field.annotation),
            "to be given" if field.is_required() else in_yaml(field.default),
            str(field.description),
        )
        for name, field in model.model_fields.items()
    ]


def meanings_of(model: type[BaseModel], prefix: str = "") -> dict[str, str]:
    """Return the meaning of each key in a mapping, by its full name."""
    meanings = {}
    for name, field in model.model_fields.items():
        meanings[f"{prefix}{name}"] = str(field.description)
        for inner in _models(field.annotation):
            meanings |= meanings_of(inner, f"{prefix}{name}.")
    return meanings


def in_yaml(value: Any) -> str:
    """Write a value in one line of YAML."""
    if isinstance(value, BaseModel):
        return "its own"
    text = yaml.safe_dump(
        value, default_flow_style=True, width=10_000, allow_unicode=True, sort_keys=False
    )
    return " ".join(text.removesuffix("...\n").split())


def _models(hint: Any) -> list[type[BaseModel]]:
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return [hint]
    return [model for part in get_args(hint) for model in _models(part)]


def _type(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _type(inner[0])
    if origin is Literal:
        return " or ".join(map(str, inner))
    if origin in (Union, types.UnionType):
        words = " or ".join(map(_type, inner)).split(" or ")
        return " or ".join(dict.fromkeys(words))
    if origin is tuple:
        return f"list ({_type(inner[0])})"
    return _WORDS.get(origin or hint, "mapping")
