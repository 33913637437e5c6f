"""Mutate the mathematics and the persistence in a copy, one fault at a time, and see that tests
catch each.

    python tests/mutations.py            # all, about ten minutes
    python tests/mutations.py NAME ...   # some

The exit status is 1 if a mutation survives, or no longer applies because the code has changed: then
mend its entry.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
STEPS = ["tests/optim/test_layer_kinds.py", "tests/optim/test_step.py"]
MUON = ["tests/optim/test_thor_muon.py"]
STATE = ["tests/optim/test_state.py", "tests/optim/test_loading.py"]
# name: (file below src/torch_thor, what stands there, what takes its place, the tests that must
# fail)
MUTATIONS = {
    "second moment without the last block": (
        "curvature/blocks.py",
        "for run, part in zip(self.cut.runs, self.parts, strict=True):\n            own = samples",
        "for run, part in list(zip(self.cut.runs, self.parts, strict=True))[:1]:\n            own "
        "= samples",
        STEPS,
    ),
    "left product transposed": (
        "curvature/blocks.py",
        "solved.append(product(part, own)",
        "solved.append(product(part.mT * 0.999, own)",
        STEPS,
    ),
    "right product without the scale": (
        "curvature/blocks.py",
        "add_product_(into, matrix, self.parts[0], decay, scale)",
        "add_product_(into, matrix, self.parts[0], decay, 1.0)",
        STEPS,
    ),
    "trace without tails": (
        "curvature/blocks.py",
        "return found if full == size else found + rows",
        "return found if full <= size else found + rows",
        ["tests/curvature", "tests/optim/test_refresh.py"],
    ),
    "blocks cut one row too late": (
        "curvature/blocks.py",
        "for first in range(start, stop, most)]",
        "for first in range(start + 1, stop, most)]",
        ["tests/curvature"],
    ),
    "damping without the root": (
        "curvature/refresh.py",
        "added = [math.sqrt(self.damping / self.rows_per_term)]",
        "added = [self.damping / self.rows_per_term]",
        STEPS,
    ),
    "damping without T": (
        "curvature/refresh.py",
        "math.sqrt(self.damping / self.rows_per_term)",
        "math.sqrt(self.damping)",
        STEPS,
    ),
    "relative damping of the trace": (
        "curvature/inverse.py",
        "mean, numbers = trace / size",
        "mean, numbers = trace",
        MUON,
    ),
    "trace rule the wrong way": (
        "curvature/refresh.py",
        "if change > thresholds[0]",
        "if change >= thresholds[0] * 2",
        ["tests/curvature/test_refresh_rule.py", "tests/optim/test_refresh.py"],
    ),
    "a layer never stops": (
        "curvature/refresh.py",
        "return Decision.STOP if change < thresholds[1] else Decision.KEEP",
        "return Decision.KEEP",
        ["tests/curvature/test_refresh_rule.py", "tests/optim/test_refresh.py"],
    ),
    "running average the wrong way": (
        "curvature/inverse.py",
        "new.lerp_(old, of.decay)",
        "new.lerp_(old, 1 - of.decay)",
        [*STEPS, "tests/optim/test_refresh.py"],
    ),
    "a failed block keeps its broken inverse": (
        "curvature/refresh.py",
        "if any(one.failed for one in self.new):",
        "if False:",
        ["tests/curvature/test_refresh_rule.py", "tests/optim/test_failures.py"],
    ),
    "gradients of outputs not scaled by N": (
        "optim/refresh_step.py",
        "g_sum.rows.mul_(scale).mul_(scale)",
        "g_sum.rows.mul_(scale)",
        STEPS,
    ),
    "means over one row too many": (
        "curvature/layer.py",
        "factor.rows.div_(rows)",
        "factor.rows.div_(rows + 1)",
        STEPS,
    ),
    "1 / T forgotten": (
        "optim/natural.py",
        "1.0 / layer.rows_per_term, scales",
        "1.0, scales",
        STEPS,
    ),
    "a bias with A": (
        "optim/natural.py",
        "if share.is_weight else (g,)",
        "if share.is_weight else (a,)",
        STEPS,
    ),
    "weight decay forgotten": (
        "optim/natural.py",
        'direction.add_(parameter, alpha=float(group["weight_decay"]))',
        "pass",
        STEPS,
    ),
    "the bound too loose": (
        "optim/natural.py",
        "return 1.0 if length <= longest else longest / length",
        "return 1.0",
        ["tests/optim/test_natural.py"],
    ),
    "kl_clip without lr": (
        "optim/natural.py",
        'torch.sum(direction * dense) * float(group["lr"]) ** 2',
        "torch.sum(direction * dense)",
        ["tests/optim/test_natural.py", "tests/optim/test_step.py"],
    ),
    "Nesterov forgotten": (
        "optim/natural.py",
        'alpha=momentum)) if group["nesterov"] else buffers',
        "alpha=momentum)) if False else buffers",
        STEPS,
    ),
    "ThorMuon without depth": (
        "optim/orthogonal.py",
        "_USUAL_DEPTH / max(1, plan.depth)",
        "1.0",
        MUON,
    ),
    "ThorMuon's norm of a tall matrix": (
        "optim/orthogonal.py",
        "max(1.0, outputs / max(1, inputs))",
        "1.0",
        MUON,
    ),
    "polar factors of one matrix": (
        "curvature/polar.py",
        "values.maximum(noise).rsqrt()",
        "values.maximum(noise).sqrt()",
        ["tests/curvature/test_polar.py"],
    ),
    "loading keeps the dtype of the base class": (
        "optim/checkpoint.py",
        "_as_made(key, value.detach(), parameter, value.dtype)",
        "_as_made(key, value.detach(), parameter, parameter.dtype)",
        STATE,
    ),
    "a refresh is not counted": (
        "curvature/refresh.py",
        "refreshes=layer.refreshes + 1)",
        "refreshes=1)",
        [*STATE, "tests/optim/test_refresh.py"],
    ),
}


def survives(name: str) -> str | None:
    """Return why a mutation was not caught; None if it was."""
    file, old, new, tests = MUTATIONS[name]
    with tempfile.TemporaryDirectory() as folder:
        for part in ("src", "tests", "pyproject.toml", "recipes"):
            source = ROOT / part
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, Path(folder) / part)
        path = Path(folder) / "src" / "torch_thor" / file
        text = path.read_text(encoding="utf-8")
        if old not in text:
            return f"{file} has no {old!r} any more"
        path.write_text(text.replace(old, new), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow",
            *tests,
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(folder) / "src"),
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        return (
            None
            if done.returncode == 1
            else f"pytest ended with {done.returncode}: {done.stdout[-300:]}"
        )


def main(names: list[str]) -> int:
    """Try the mutations, print what became of each, and return the exit status."""
    failed = 0
    for name in names or MUTATIONS:
        why = survives(name)
        failed += why is not None
        print(f"{name}: {'caught' if why is None else f'SURVIVED: {why}'}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
