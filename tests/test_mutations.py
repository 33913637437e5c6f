"""The entries of mutations.py can be applied; running it shows which are caught."""

import ast
import shutil
from pathlib import Path

import pytest

import torch_thor
from mutations import MUTATIONS

SOURCE = Path(torch_thor.__file__).parent


@pytest.mark.parametrize("name", MUTATIONS)
def test_an_entry_changes_its_file(name, tmp_path):
    mutation = MUTATIONS[name]
    copy = tmp_path / mutation.file
    copy.parent.mkdir(parents=True)
    shutil.copy(SOURCE / mutation.file, copy)
    mutation.apply(tmp_path)
    ast.parse(copy.read_text())
    assert all((Path(__file__).parents[1] / test).exists() for test in mutation.tests)
