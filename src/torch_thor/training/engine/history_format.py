"""Conversion of the measurements of a run to JSON values and back: as lines of `metrics.jsonl`, and as columns."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from torch_thor.training.engine.history import AVERAGED, KINDS, EvalPoint, History, Point


def to_line(point: Point) -> dict[str, Any]:
    """Convert a point to a line of `metrics.jsonl`.

    Args:
        point: A step, a refresh of a layer or an evaluation.

    Returns:
        A flat mapping whose first key is `kind`. Infinity and NaN, which JSON does not have, become `None`.
    """
    kind = next(name for name, cls in KINDS.items() if isinstance(point, cls))
    return {"kind": kind, **{key: _plain(value) for key, value in _flat(point).items()}}


def _flat(point: Point) -> dict[str, Any]:
    if not isinstance(point, EvalPoint):
        return asdict(point)
    averaged = point.averaged or dict.fromkeys(point.metrics)
    return {
        "step": point.step,
        "seconds": point.seconds,
        **point.metrics,
        **{f"{AVERAGED}{name}": value for name, value in averaged.items()},
        "primary": point.primary,
        "higher_is_better": point.higher_is_better,
    }


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def from_lines(lines: list[dict[str, Any]]) -> History:
    """Rebuild a history from the lines of `metrics.jsonl`.

    Args:
        lines: The mappings from `to_line`, in order.

    Returns:
        The history.
    """
    history = History()
    lists: dict[str, list[Any]] = {
        "step": history.steps,
        "refresh": history.refreshes,
        "eval": history.evaluations,
    }
    for line in lines:
        kind = line["kind"]
        lists[kind].append(_point(kind, {key: value for key, value in line.items() if key != "kind"}))
    return history


def _point(kind: str, values: dict[str, Any]) -> Point:
    if kind == "eval":
        return _evaluation(values)
    if kind == "step":
        values["loss"] = _number(values["loss"])
    return KINDS[kind](**values)


def _evaluation(values: dict[str, Any]) -> EvalPoint:
    own = {item.name: values.pop(item.name) for item in fields(EvalPoint) if item.name in values}
    averaged = {key.removeprefix(AVERAGED): values.pop(key) for key in list(values) if key.startswith(AVERAGED)}
    metrics = {name: _number(value) for name, value in values.items()}
    point = EvalPoint(**own, metrics=metrics)
    if point.primary not in metrics or "loss" not in metrics:
        raise KeyError(point.primary if "loss" in metrics else "loss")
    has_average = averaged.get(point.primary) is not None or averaged.get("loss") is not None
    found = {name: _number(value) for name, value in averaged.items()} if has_average else None
    return EvalPoint(**own, metrics=metrics, averaged=found)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def to_columns(kind: str, points: Sequence[Point], metrics: Sequence[str]) -> dict[str, list[Any]]:
    """Convert points of one kind to one list per field, which needs much less space than one mapping per point.

    Args:
        kind: A key of `KINDS`.
        points: Points of that kind.
        metrics: Names of the metrics of evaluations, which have columns even if there are no points.

    Returns:
        The values of each field or metric, in order. Infinity and NaN are kept.
    """
    rows = [_flat(point) for point in points]
    if kind == "eval":
        names = [*_flat(EvalPoint(0, 0.0, dict.fromkeys(metrics, 0.0)))]
    else:
        names = [item.name for item in fields(KINDS[kind])]
    return {name: [row[name] for row in rows] for name in names}


def from_columns(kind: str, columns: Mapping[str, list[Any]]) -> list[Any]:
    """Rebuild points from columns.

    Args:
        kind: A key of `KINDS`.
        columns: The mapping from `to_columns`.

    Returns:
        The points.
    """
    return [_point(kind, dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)]
