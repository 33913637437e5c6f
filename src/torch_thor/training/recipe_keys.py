"""What a recipe's mappings share: types, rules between keys, lines of errors, tables of keys."""

import json
import re
import types
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

Whole = Annotated[int, Strict()]  # strict: true is no number, and the text "3" none either
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Count = Annotated[Whole, Field(ge=1)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
LayerParameter = Annotated[Number, Field(ge=0, lt=1)]

_FAULTS = "faults"
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
            raise PydanticCustomError(_FAULTS, "{lines}", {"lines": faults})
        return self


def nearest(name: str, names: Iterable[str]) -> str:
    """Return " (did you mean X?)" for the most similar name, or nothing if none is similar."""
    matches = get_close_matches(name, list(names), 1)
    return f" (did you mean {matches[0]}?)" if matches else ""


def lines_of(error: ValidationError, meanings: Mapping[str, str]) -> list[str]:
    """Describe each fault found by pydantic in one line: full key, value, rule and meaning."""
    lines = []
    for fault in error.errors(include_url=False):
        key = "".join(
            f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"]
        ).removeprefix(".")
        meaning = meanings.get(re.sub(r"\[\d+\]", "[]", key)) or meanings.get(
            re.sub(r"\[\d+\]$", "", key)
        )
        about = "" if meaning is None else f" ({meaning})"
        shown = _yaml(fault["input"])[:80]
        text = fault["input"] if isinstance(fault["input"], str) else ""
        # The text would seem to be right: in quotes, or with a leading 0, base 8 in YAML 1.1.
        if fault["type"] in ("int_type", "float_type") and re.match(r"[-+]?\.?\d", text):
            shown = f"'{shown}' is text and"
            if text.isdecimal():
                about += f": write {int(text)}, without quotes and without 0 in front"
        if fault["type"] == _FAULTS:
            lines += [f"{key}.{line}".removeprefix(".") for line in fault["ctx"]["lines"]]
        elif fault["type"] == "extra_forbidden" and "." in str(fault["loc"][-1]):
            *outer, inner = str(fault["loc"][-1]).split(".")
            nested = "".join(f"{part}: {{" for part in outer) + f"{inner}: {shown}"
            lines.append(
                f"there is no key {key}: dots are for words of the command line; write "
                f"{nested}{'}' * len(outer)}"
            )
        elif fault["type"] == "extra_forbidden" and key in meanings:
            lines.append(
                f"{key} is a setting of some optimizers: name one in optimizer, or give "
                f"optimizers.NAME.{key}"
            )
        elif fault["type"] == "extra_forbidden":
            lines.append(
                f"there is no key {key}{nearest(key, meanings)}: `torch-thor keys` lists them"
            )
        elif fault["type"] == "missing":
            lines.append(f"{key} is missing: give it{about}")
        elif fault["type"] == "value_error":
            lines.append(f"{key}={shown}: {fault['ctx']['error']}{about}")
        else:
            rule = (
                fault["msg"]
                .removeprefix("Input ")
                .replace("dictionary or instance of", "mapping of")
            )
            rule = rule.replace("tuple", "list").replace(
                "boolean, unable to interpret input", "true or false"
            )
            lines.append(f"{key}={shown} {rule}{about}")
    return lines


def rows(model: type[BaseModel]) -> list[tuple[str, str, str, str]]:
    """Return key, type, default and meaning of each key of a mapping, in words and in YAML."""
    return [
        (
            name,
            _type(field.annotation),
            "to be given" if field.is_required() else _yaml(field.default),
            str(field.description),
        )
        for name, field in model.model_fields.items()
    ]


def meanings_of(model: type[BaseModel], prefix: str = "") -> dict[str, str]:
    """Return each key's meaning in a mapping by full name, such as `phases[].steps` for items."""
    meanings = {}
    for name, field in model.model_fields.items():
        meanings[f"{prefix}{name}"] = str(field.description)
        many = "[]" if get_origin(field.annotation) is tuple else ""
        for inner in _models(field.annotation):
            meanings.update(meanings_of(inner, f"{prefix}{name}{many}."))
    return meanings


def as_written(value: Any, texts: Any, hint: Any) -> Any:
    """Return a mapping's values with numbers as they were written where a key takes text alone.

    Such a key is a path or a name: 2024_01_01 and 1.10 are others than 20240101 and 1.1.

    Args:
        value: The mapping, or a value of it.
        texts: The same, with the text of each scalar.
        hint: Its type.
    """
    if isinstance(value, dict) and isinstance(texts, dict):
        fields = {
            name: field.annotation
            for model in _models(hint)
            for name, field in model.model_fields.items()
        }
        pairs = zip(value.items(), texts.values(), strict=False)  # 1 and 1.0 are one key
        return {key: as_written(item, text, fields.get(key)) for (key, item), text in pairs}
    if isinstance(value, list) and isinstance(texts, list):
        return [as_written(item, text, hint) for item, text in zip(value, texts, strict=True)]
    kinds = _leaves(hint)
    takes_text = str in kinds and int not in kinds and float not in kinds
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return texts if is_number and takes_text else value


def _leaves(hint: Any) -> list[Any]:
    inner = get_args(hint)
    return [leaf for part in inner for leaf in _leaves(part)] if inner else [hint]


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


def _yaml(value: Any) -> str:
    """Write a value in one line, which YAML reads unless its text has brackets or the like."""

    def other(item: Any) -> str:
        return "its own" if isinstance(item, BaseModel) else str(item)

    text = json.dumps(value, default=other, skipkeys=True, ensure_ascii=False)
    return text if value == "" else text.replace('"', "")
