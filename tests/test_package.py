"""What is shipped, and that its documentation and its messages name what there is."""

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

ROOT = Path(__file__).parents[1]


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
def test_what_is_released_trains_from_an_empty_folder_and_needs_only_torch(tmp_path):
    """The wheel is built from the sdist, and installed without this checkout."""
    subprocess.run([sys.executable, "-m", "build", "-n", "-o", tmp_path, ROOT], check=True)
    (wheel,), (sdist,) = tmp_path.glob("torch_thor-*.whl"), tmp_path.glob("torch_thor-*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    wanted = "LICENSE README.md recipes/digits.yaml tests/test_package.py benchmarks/suite.py"
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
    assert {
        f"torch_thor/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")
    } <= names
    assert {"torch_thor/py.typed", "torch_thor/optim/thor.py"} <= names
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"torch_thor"}
    assert not [name for name in names if "bench" in name or "figure" in name or "example" in name]
    assert [r.split(">")[0] for r in requirements if "extra ==" not in r] == ["torch"]


@pytest.mark.slow
def test_the_notebook_runs_and_ends_in_a_plot(monkeypatch):
    monkeypatch.delenv("MPLBACKEND", raising=False)  # a notebook has its own
    notebook = nbformat.read(ROOT / "docs/tutorial/five-minutes.ipynb", as_version=4)
    # a reader sees what the own machine shows
    assert not any(cell.get("outputs") for cell in notebook.cells)
    NotebookClient(notebook, timeout=600).execute()
    last = [cell for cell in notebook.cells if cell.cell_type == "code"][-1]
    assert any("image/png" in output.get("data", {}) for output in last.outputs)
