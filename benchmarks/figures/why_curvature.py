"""What curvature gains, and what remains of it when it is approximated as THOR does.

A network of two layers and 760 parameters learns 500 of scikit-learn's digits, all of them in each
step, in float64. So a gradient has no noise, and the whole Fisher matrix can be computed. Gradient
descent, with and without momentum, stands beside the natural gradient with the whole matrix, with
Kronecker factors, and with blocks of the factors that are refreshed ever more rarely. Each has as
many trials and shows its best. Beside the losses stand the cubes of the sides of the matrices
that a step inverts, which are what an inversion costs.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional as F

from benchmarks.figures.training import Options, Row, grouped, short
from benchmarks.runner import markdown
from benchmarks.runner.drawing import draw_band, save
from torch_thor import THOR
from torch_thor.intervals import Geometric

if TYPE_CHECKING:  # slow to import
    from matplotlib.axes import Axes

ABOUT = "what curvature gains on a small network, and what its approximations keep and cost"
TAKES = ("epochs", "seeds")
STEPS, IMAGES = 40, 500
HIDDEN, BLOCK = 10, 32
INTERVAL = Geometric(1, 10, factor=1.5)
RATES = (0.125, 0.25, 0.5, 1.0, 2.0)
DAMPINGS = (0.1, 0.01, 0.001, 0.0001)
# for gradient descent, which has no damping, as many learning rates as the others have pairs
FIRST_ORDER = tuple((0.05 * 2 ** (trial / 2), 0.0) for trial in range(20))
SECOND_ORDER = tuple(itertools.product(RATES, DAMPINGS))
SETTINGS = {
    "gradient descent": FIRST_ORDER,
    "gradient descent with momentum": FIRST_ORDER,
    "natural gradient": SECOND_ORDER,
    "Kronecker factors": SECOND_ORDER,
    f"blocks of {BLOCK}, ever rarer refreshes": SECOND_ORDER,
}

Step = Callable[[], float]  # takes a step, and returns the loss before it


def jobs(options: Options, device: str) -> list[Row]:
    """List the methods. A step sees all images, so steps are epochs; all run on a CPU."""
    steps = options.get("epochs", STEPS)
    return [
        {"setting": setting, "seed": seed, "steps": steps, "trials": len(trials), "device": "cpu"}
        for seed in options.get("seeds", (0,))
        for setting, trials in SETTINGS.items()
    ]


def optimizers(job: Row) -> list[str]:
    """Name our optimizer, if it is one that takes the steps."""
    return ["THOR"] if job["setting"] in list(SETTINGS)[3:] else []


def run(job: Row) -> Row:
    """Train once for each trial, and keep the one that ends with the lowest loss."""
    torch.set_num_threads(1)
    trials = [
        (losses_of(job, lr, damping), lr, damping) for lr, damping in SETTINGS[job["setting"]]
    ]
    losses, lr, damping = min(trials, key=lambda trial: trial[0][-1])
    return {
        "value": losses[-1],
        "losses": losses,
        "lr": short(lr),
        "damping": damping,
        "cubes": cubes(job["setting"], job["steps"]),
    }


def losses_of(job: Row, lr: float, damping: float) -> list[float]:
    """Return the loss before each step and after the last, or until it is not finite."""
    model, x, y = network(job["seed"])
    step = step_of(job["setting"], model, x, y, lr, damping)
    losses: list[float] = []
    while len(losses) <= job["steps"]:
        loss = step()
        if not math.isfinite(loss):
            return [*losses, math.inf]
        losses.append(short(loss))
    return losses


def network(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Return the network, the images and their digits."""
    from sklearn.datasets import load_digits  # slow to import

    digits = load_digits()
    torch.manual_seed(seed)
    layers = nn.Linear(64, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 10)
    return (
        nn.Sequential(*layers).double(),
        torch.from_numpy(digits.data[:IMAGES]) / 16,
        torch.from_numpy(digits.target[:IMAGES]),
    )


def step_of(
    setting: str, model: nn.Module, x: Tensor, y: Tensor, lr: float, damping: float
) -> Step:
    """Return what takes a step of a method."""
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer
    if setting.startswith("gradient descent"):
        momentum = 0.9 if "momentum" in setting else 0.0
        optimizer = torch.optim.SGD(parameters, lr=lr, momentum=momentum)
    elif setting == "natural gradient":
        optimizer = torch.optim.SGD(parameters, lr=lr)
    else:
        whole = setting == "Kronecker factors"
        optimizer = THOR(
            model, lr=lr, damping=damping, momentum=0.0, fisher="sampled", max_update_ratio=None,
            trace_thresholds=(0.0, 0.0), split_dim=None if whole else BLOCK,
            update_interval=1 if whole else INTERVAL,
        )  # fmt: skip

    def step() -> float:
        optimizer.zero_grad()
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        if not loss.isfinite():
            return math.inf
        if isinstance(optimizer, THOR):
            optimizer.sample_fisher(logits)
        loss.backward()
        if setting == "natural gradient":
            precondition_(parameters, fisher(model, x), damping)
        optimizer.step()
        return loss.item()

    return step


def fisher(model: nn.Module, x: Tensor) -> Tensor:
    """Return the Fisher matrix of a classifier, (1/N) Σ Jᵀ (diag(p) − p pᵀ) J, exactly."""
    names = [name for name, _ in model.named_parameters()]
    weights = dict(model.named_parameters())

    def logits(weights: dict[str, Tensor], image: Tensor) -> Tensor:
        return functional_call(model, weights, (image,))

    found = vmap(jacrev(logits), (None, 0))(weights, x)
    jacobian = torch.cat([found[name].detach().flatten(2) for name in names], 2)
    p = model(x).detach().softmax(1)
    weighted = p[..., None] * jacobian
    mean = weighted.sum(1)
    whole = jacobian.flatten(0, 1).T @ weighted.flatten(0, 1) - mean.T @ mean
    return whole / len(x)


def precondition_(parameters: Sequence[nn.Parameter], matrix: Tensor, damping: float) -> None:
    """Replace the gradients by ``(F + λI)⁻¹ ∇``."""
    gradient = torch.cat([one.grad.flatten() for one in parameters if one.grad is not None])
    damped = matrix + damping * torch.eye(len(matrix), dtype=matrix.dtype)
    direction = torch.cholesky_solve(gradient[:, None], torch.linalg.cholesky(damped))[:, 0]
    sizes = [one.numel() for one in parameters]
    for one, part in zip(parameters, direction.split(sizes), strict=True):
        one.grad = part.view_as(one)


def cubes(setting: str, steps: int) -> float:
    """Return the sum of the cubes of the sides of the matrices that a step inverts, on average."""
    sides = [64, HIDDEN, HIDDEN, 10]  # of A and G of both layers
    if setting == "natural gradient":
        return float((64 * HIDDEN + HIDDEN + HIDDEN * 10 + 10) ** 3)
    if setting == "Kronecker factors":
        return float(sum(side**3 for side in sides))
    if setting.startswith("blocks"):
        blocks = [min(BLOCK, side - start) for side in sides for start in range(0, side, BLOCK)]
        return sum(block**3 for block in blocks) * refreshes(steps) / steps
    return 0.0


def refreshes(steps: int) -> int:
    """Return the number of refreshes in that many steps."""
    at = count = 0
    while at < steps:
        at, count = at + INTERVAL(at), count + 1
    return count


def table(rows: Sequence[Row]) -> str:
    """Return where each method ends, and the steps in which it is where gradient descent ends."""
    lines = []
    targets = {row["job"]["seed"]: row["value"] for row in rows[:: len(SETTINGS)]}
    for setting, own in grouped(rows, lambda job: job["setting"]).items():
        steps = [first_below(row["losses"], targets[row["job"]["seed"]]) for row in own]
        best = "; ".join(
            f"{row['lr']:.3g}" + (f", {row['damping']:g}" if row["damping"] else "") for row in own
        )
        lines.append((
            setting, markdown.summary([row["value"] for row in own], ".4f"),
            markdown.reached(steps, ".0f"), f"{own[0]['cubes']:,.0f}", best,
        ))  # fmt: skip
    heads = (
        "method", f"loss after {rows[0]['job']['steps']} steps", "steps to gradient descent's",
        "cubes of sides inverted a step", "best learning rate, damping",
    )  # fmt: skip
    trials = f"Each is the best of {rows[0]['job']['trials']} trials."
    return f"{markdown.table(heads, lines)}\n\n{trials}"


def first_below(losses: Sequence[float], target: float) -> int | None:
    """Return the first step after which the loss is not above a target."""
    return next((step for step, loss in enumerate(losses) if loss <= target), None)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw a valley with both directions, and the losses of the network."""
    from matplotlib.figure import Figure  # slow to import

    picture = Figure(figsize=(11, 5.4), layout="constrained")
    valley, losses = picture.subplots(1, 2, width_ratios=[1, 1.25])
    draw_valley(valley)
    for setting, own in grouped(rows, lambda job: job["setting"]).items():
        series = [row["losses"] for row in own]
        draw_band(losses, range(len(series[0])), series, label=setting)
    losses.set(
        yscale="log", xlabel="steps", ylabel="training loss", title="a small network on digits"
    )
    losses.grid(alpha=0.3)
    handles, _ = losses.get_legend_handles_labels()
    picture.legend(handles=handles, loc="outside lower right", ncols=3, fontsize=11)
    save(picture, path)


def draw_valley(axes: "Axes") -> None:
    """Draw gradient descent and Newton's step in the valley ``½ (x² + 20 y²)``, from (−4, 1)."""
    curvature, start = torch.tensor([1.0, 20.0]), torch.tensor([-4.0, 1.0])
    across, along = torch.linspace(-1.6, 1.6, 101), torch.linspace(-4.6, 1.2, 101)
    height = (curvature[0] * along[None] ** 2 + curvature[1] * across[:, None] ** 2) / 2
    axes.contour(along, across, height, levels=[0.1, 0.5, 2, 5, 10, 18], colors="0.75")
    paths = {"gradient descent, 15 steps": [start], "Newton, 1 step": [start, torch.zeros(2)]}
    for point in range(15):
        path = paths["gradient descent, 15 steps"]
        path.append(path[point] - 0.09 * curvature * path[point])
    for label, path in paths.items():
        x, y = torch.stack(path).T
        axes.plot(x, y, marker="o", ms=4, label=label)
    axes.plot(0, 0, "k*", ms=11)
    axes.set(xlabel="x", ylabel="y", title="the valley ½ (x² + 20 y²)")
    axes.legend(fontsize=11, loc="lower left")
