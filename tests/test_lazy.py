"""Packages that export names and import the modules of these on first use."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import torch_thor

SOURCE = Path(torch_thor.__file__).parent
LAZY = {
    ".".join(path.parent.relative_to(SOURCE.parent).parts): path
    for path in SOURCE.rglob("__init__.py")
    if "lazy_names(" in path.read_text()
}


def imported_for_type_checkers(path):
    """Module to names, as imported under `if TYPE_CHECKING`."""
    (block,) = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return {node.module: {alias.name for alias in node.names} for node in block.body}


@pytest.mark.parametrize("package", LAZY)
def test_the_lists_of_a_package_agree(package):
    module = import_module(package)
    checked = imported_for_type_checkers(LAZY[package])
    modules = checked.pop(package, set())  # submodules that the package exports
    assert {home: set(names) for home, names in module._MODULES.items()} == checked
    names = [name for names in module._MODULES.values() for name in names]
    assert sorted([*names, *modules]) == sorted({*module.__all__} - {"__version__"})


@pytest.mark.parametrize("package", LAZY)
def test_a_name_is_that_of_its_module(package):
    module = import_module(package)
    for home, names in module._MODULES.items():
        for name in names:
            found = getattr(module, name)
            assert found is getattr(import_module(home), name)
            assert found is vars(module)[name]  # the next time it is an ordinary attribute
    assert {*module.__all__} <= {*dir(module)}
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'no_such_name'"):
        module.no_such_name  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'no_such_name'"):
        exec(f"from {package} import no_such_name")


def test_a_package_imports_no_library():
    code = (
        f"import sys, {', '.join(LAZY)}; print({{'torch', 'rich', 'pydantic'}} & {{*sys.modules}})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600
    )
    assert done.stdout.strip() == "set()"
