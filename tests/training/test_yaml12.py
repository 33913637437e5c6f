"""YAML 1.2: which scalars are numbers, round trips of odd text, faults with line and remedy."""

import math

import pytest
import yaml

from torch_thor.errors import UserError
from torch_thor.training.recipes import load_recipe
from torch_thor.training.yaml12 import read_yaml, write_yaml

SCALARS = {
    "10": 10, "1_000": 1000, "-3": -3, "+5": 5, "0": 0, "0o17": 15, "0xfF": 255,
    "1e-4": 1e-4, "1E3": 1000.0,
    ".5": 0.5, "5.": 5.0, "-0.25": -0.25, "08.5": 8.5, "-.inf": -math.inf,
    "true": True, "FALSE": False, "~": None, "null": None, "": None,
}  # fmt: skip
# numbers, truths and dates of version 1.1, and what looks like them
TEXTS = (
    "010", "0064", "-012", "1:30", "12:30:45", "1:30.5",
    "1__0", "0b11", "0o8", "-0o7", "yes", "no", "On", "off", "y",
    "2026-01-01", "2024-13-01", "1e", "e5", "1.2.3", "=", "<<", "nUll", ".INf",
)  # fmt: skip


def test_scalars_are_those_of_version_1_2():
    for text, value in SCALARS.items():
        found = read_yaml(text, "it")
        assert (type(found), found) == (type(value), value), text
    assert math.isnan(read_yaml(".nan", "it"))
    for text in TEXTS:
        assert read_yaml(text, "it") == text


def test_text_and_numbers_are_read_as_they_were_written():
    values = [*SCALARS, *TEXTS, *SCALARS.values(), "a: b", "#c", "- d", "café", "x\ny", "{", "'"]
    assert read_yaml(write_yaml({"a": values}), "it") == {"a": values}
    for value in values:
        # a reader of version 1.1 finds the same text
        if isinstance(value, str):
            assert yaml.safe_load(write_yaml([value])) == [value]


FAULTS = {
    "a: 1\n\tb: 2\n": ("in line 2, `b: 2`", "indent with spaces, not with tabs"),
    "a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\n": (
        "the key c is given twice, in lines 3 and 5",
        "remove one",
    ),
    "a: 1\nb: *c\n": ("an alias, *c, in line 2", "quote text that begins with *"),
    "a: 1\nb: [1, 2\nc: 3\n": ("line 3, `c: 3`", "quote text that contains brackets"),
    "a: 1\nb: x: y\n": ("in line 2, `b: x: y`", "colons"),
    "a: 1\n---\nb: 2\n": ("another document in line 2", "one recipe in a file"),
    "a: 1\nb: \x00\n": ("in line 2", "plain UTF-8"),
    "a: !!int 010\n": ("a value that !!int does not have in line 1", "`a: !!int", "leave out tags"),
    "a: !!bool maybe\n": ("a value that !!bool does not have in line 1", "and quote text"),
    "a: !!bool ''\n": ("a value that !!bool does not have in line 1", "leave out tags"),
    "a: 1\nb: !!timestamp foo\n": (
        "a value that !!timestamp does not have",
        "in line 2",
        "leave out tags",
    ),
    "a: !!float ''\n": ("a value that !!float does not have", "in line 1", "leave out tags"),
    "a: !!int [1]\n": ("a value that !!int does not have", "in line 1", "leave out tags"),
    "a: !!set [1]\n": ("expected a mapping node, but found sequence in line 1", "quote text"),
    "a: " + "[" * 30: ("nested in more than 20 levels in line 1", "a recipe has a few"),
}


def test_a_fault_has_its_line_and_a_remedy():
    for text, said in FAULTS.items():
        with pytest.raises(UserError, match=r"^recipe x is not YAML \(") as caught:
            read_yaml(text, "recipe x")
        assert all(part in str(caught.value) for part in said), (said, str(caught.value))
        assert "\n" not in str(caught.value)


def test_the_end_of_a_files_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("UPPER.YAML", "short.yml", "mine.toml"):
        (tmp_path / name).write_text("seed: 4\n")
    assert load_recipe("UPPER.YAML").seed == load_recipe("short.yml").seed == 4
    with pytest.raises(UserError, match=r"mine.toml is not read .* end in .yaml or .yml: rename"):
        load_recipe("mine.toml")
    (tmp_path / "latin.yaml").write_bytes("seed: 4\nabout: é\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin.yaml is not UTF-8 \(line 2, byte 15\): save it"):
        load_recipe("latin.yaml")
