"""What is shipped, and which way the arrows point."""

import ast
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "torch_thor"

# Each package may import itself and those below it.
LAYERS = ["curvature", "distributed", "split", "optim", "training", "bench", "cli"]


def test_core_needs_torch_alone():
    """`from torch_thor import *` must not pull in what only the training application needs."""
    extras = ["torchvision", "sklearn", "omegaconf", "typer", "rich", "matplotlib", "tensorboard", "safetensors"]
    code = f"import sys; from torch_thor import *; found = {{*{extras}}} & {{*sys.modules}}; assert not found, found"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_public_names_are_there_and_torch_is_imported_with_the_first():
    code = """
import sys, torch_thor
assert "torch" not in sys.modules, "to import torch takes seconds: Ctrl-C must already be listened to"
assert set(torch_thor.__all__) <= set(dir(torch_thor))
for name in torch_thor.__all__:
    assert getattr(torch_thor, name) is getattr(torch_thor, name)
assert torch_thor.THOR is torch_thor.optim.thor.THOR
assert not hasattr(torch_thor, "THRO")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def imported_packages(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            root, *rest = name.split(".")
            if root == "torch_thor" and rest and rest[0] in LAYERS:
                yield rest[0]


def test_arrows_point_one_way():
    checked = 0
    for path in SOURCE.rglob("*.py"):
        package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if package not in LAYERS:
            continue
        for target in imported_packages(path):
            checked += 1
            assert LAYERS.index(target) <= LAYERS.index(package), f"{path.name} in {package} imports {target}"
    assert checked > 20


@pytest.mark.slow
def test_wheel_ships_recipes_and_needs_torch_alone(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*command, str(ROOT)], check=True, timeout=300)
    (wheel,) = tmp_path.glob("torch_thor-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        requirements = Parser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist")
    shipped = {f"torch_thor/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")}
    assert len(shipped) >= 2
    assert shipped <= names
    assert {"torch_thor/py.typed", "torch_thor/optim/thor.py"} <= names
    assert [r.split(">")[0] for r in requirements if "extra ==" not in r] == ["torch"]
