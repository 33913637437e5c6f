"""What is shipped, and that its documentation and its messages name what there is."""

import ast
import inspect
import pkgutil
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import torch_thor

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "torch_thor"
OPTIMIZERS = ("capture", "curvature", "distributed", "optim")


def test_public_names_are_there_and_import_torch_alone():
    """`from torch_thor import *` must not pull in what only the training application needs."""
    code = """
import sys, torch_thor
assert set(torch_thor.__all__) <= set(dir(torch_thor))
from torch_thor import *
extras = {"torchvision", "sklearn", "pydantic", "typer", "rich", "matplotlib", "tensorboard"}
extras |= {"safetensors"}
assert not extras & {*sys.modules}, extras & {*sys.modules}
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def resolves(name):
    try:
        return pkgutil.resolve_name(name) is not None
    except (ImportError, AttributeError):
        return False


def test_names_in_docstrings_resolve():
    """The target of a role is an absolute name, or one of the module or of a class in it."""
    missing, checked = [], 0
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        module = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
        places = [module, *(f"{module}.{name}" for name in re.findall(r"(?m)^class (\w+)", text))]
        for role, target in re.findall(r":(mod|class|func|meth|attr|data|exc):`([^`]+)`", text):
            checked += 1
            is_whole = role == "mod" or "." in target
            names = [f"{place}.{target}" for place in places] + [target] * is_whole
            missing += [] if any(map(resolves, names)) else [f"{module}: {target}"]
    assert not missing
    assert checked >= 20


# shapes, and arguments of torch and of trainers
OTHERS = {
    "d_in", "d_out", "gradient", "learning_rate", "opt", "opt_func", "optimizers", "requires_grad",
    "sparse", "use_reentrant",
}  # fmt: skip


def test_options_in_messages_exist():
    """`word=` in a text of the optimizers is an option of something public or an attribute."""
    kinds, options = torch_thor.curvature, torch_thor.THOR
    public = [getattr(torch_thor, name) for name in torch_thor.__all__] + [options.sample_fisher]
    public += [torch_thor.intervals.Geometric, torch_thor.intervals.Piecewise]
    known = OTHERS | {*dir(options), *dir(kinds.Kind), *dir(kinds.LayerCurvature)}
    known |= {name for base in kinds.Kind.__mro__ for name in inspect.get_annotations(base)}
    for one in filter(callable, public):
        known |= {*inspect.signature(one).parameters}
    unknown, checked = [], 0
    for path in [*(p for part in OPTIMIZERS for p in (SOURCE / part).rglob("*.py"))]:
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text and id(node) not in docstrings:
                words = re.findall(r"\b([a-z_]+)=(?!=)", node.value)
                checked += len(words)
                unknown += [f"{path.name}: {word}=" for word in words if word not in known]
    assert not unknown
    assert checked > 40


TRAINS = """
import torch, torch_thor
assert torch_thor.__file__.startswith({place!r})
model = torch.nn.Linear(3, 2)
optimizer = torch_thor.ThorMuon(model)
x = torch.randn(8, 3)
losses = []
for _ in range(20):
    losses.append((model(x) - x[:, :2]).square().mean())
    losses[-1].backward()
    optimizer.step()
    optimizer.zero_grad()
assert losses[-1] < losses[0] / 2
from torch_thor.cli import main
main()
"""


@pytest.mark.slow
def test_what_is_released_trains_from_an_empty_folder_and_needs_torch_alone(tmp_path):
    """The wheel is built from the sdist, and installed without this checkout."""
    subprocess.run([sys.executable, "-m", "build", "-n", "-o", tmp_path, ROOT], check=True)
    (wheel,), (sdist,) = tmp_path.glob("torch_thor-*.whl"), tmp_path.glob("torch_thor-*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    wanted = "LICENSE README.md CITATION.cff recipes/digits.yaml tests/test_package.py"
    wanted += (
        " benchmarks/suite.py benchmarks/runner/study.py benchmarks/gpu.sh examples/nanogpt.py"
    )
    assert {*wanted.split()} <= inside
    venv.create(tmp_path / "venv", with_pip=True)
    place = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")})
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", wheel], check=True)
    (Path(place) / "those_of_here.pth").write_text(sysconfig.get_path("purelib"))
    (tmp_path / "empty").mkdir()
    code = f"import sys; sys.argv[1:] = ['train', '--list']{TRAINS.format(place=place)}"
    words = [python, "-I", "-c", code]  # without the PYTHONPATH of whoever runs the tests
    done = subprocess.run(words, cwd=tmp_path / "empty", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "digits " in done.stdout
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        requirements = Parser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist")
    shipped = {f"torch_thor/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")}
    assert len(shipped) >= 2
    assert shipped <= names
    assert {"torch_thor/py.typed", "torch_thor/optim/thor.py"} <= names
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"torch_thor"}
    assert not [name for name in names if "bench" in name or "figure" in name or "example" in name]
    assert [r.split(">")[0] for r in requirements if "extra ==" not in r] == ["torch"]


@pytest.mark.slow
def test_the_notebook_runs_and_ends_in_a_plot(monkeypatch):
    monkeypatch.delenv("MPLBACKEND", raising=False)  # that of notebooks
    notebook = nbformat.read(ROOT / "docs/tutorial/five-minutes.ipynb", as_version=4)
    # what it shows is that of the reader's machine
    assert not any(cell.get("outputs") for cell in notebook.cells)
    NotebookClient(notebook, timeout=600).execute()
    last = [cell for cell in notebook.cells if cell.cell_type == "code"][-1]
    assert any("image/png" in output.get("data", {}) for output in last.outputs)
