"""ThorMuon's defaults beyond the suite: other networks, special weights, depths and widths.

The networks are a SIREN, a DQN, PPO and a GAN; one learning rate serves all depths and widths.

    python -m benchmarks defaults          # runs what is missing: a quarter of an hour of a core
    python -m benchmarks defaults --table

Cases: each is trained with AdamW(1e-3), ``ThorMuon(model)``, and the same with a tighter bound of
the step (``max_update_ratio=0.05``) and without one (``None``), from the same weights. None of
these networks has more than 10 matrices, so the depth rule changes nothing here: the last setting
is the step without both rules.

Special weights: depthwise convolutions, of which each channel is a matrix with one row, and the
factors of LoRA adapters are orthogonalised like every other weight, or trained by ThorMuon's AdamW
(``layers="-*apart*"``); beside them AdamW for the whole network, with three learning rates.

Sizes: a pre-norm transformer and a ResNet in several depths and widths, at the default learning
rate, half of it and twice of it. The special weights and the sizes are trained for 120 steps with
linear decay; the result is the loss on held-out data.
"""

import itertools
import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.runner import markdown
from benchmarks.runner.stores import key_of
from benchmarks.suite_problems import images, next_characters, windows
from torch_thor import ThorMuon
from torch_thor.training.data.small import SYMBOLS
from torch_thor.training.models.small import BasicBlock

SEEDS = (0, 1, 2)
STEPS, CONTEXT = 120, 64
Make = Callable[[nn.Module], torch.optim.Optimizer]
Result = dict[str, Any]
Job = dict[str, Any]


def adamw(lr: float, model: nn.Module) -> torch.optim.Optimizer:
    """Make AdamW for the weights that are trained."""
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=lr)


OPTIMIZERS: dict[str, Make] = {
    "AdamW(1e-3)": partial(adamw, 1e-3),
    "AdamW(3e-3)": partial(adamw, 3e-3),
    "AdamW(1e-2)": partial(adamw, 1e-2),
    "ThorMuon, defaults": ThorMuon,
    "… bound 0.05": partial(ThorMuon, max_update_ratio=0.05),
    "… without a bound": partial(ThorMuon, max_update_ratio=None),
    "… these weights by AdamW": partial(ThorMuon, layers="-*apart*"),
    "lr 0.04": partial(ThorMuon, lr=0.04),
    "lr 0.08": partial(ThorMuon, lr=0.08),
    "lr 0.16": partial(ThorMuon, lr=0.16),
}


def descend(
    model: nn.Module, make: Make, loss_of: Callable[[], Tensor], steps: int, decay: bool
) -> list[float]:
    """Train, and return the loss of every step."""
    optimizer, losses = make(model), []
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - decay * step / steps)
    for _ in range(steps):
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses


# ---- cases ---------------------------------------------------------------------------------------


class Sine(nn.Linear):
    """A layer of SIREN with its initialisation (Sitzmann et al. 2020, section 3.2; w0 = 30)."""

    def __init__(self, inputs: int, outputs: int, first: bool = False) -> None:
        super().__init__(inputs, outputs)
        bound = 1 / inputs if first else math.sqrt(6 / inputs) / 30
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer and the sine."""
        return torch.sin(30 * super().forward(x))


def siren(make: Make, steps: int, decay: bool) -> Result:
    """Fit a SIREN 2-64-64-64-1 to a photograph of 48 x 48 grey pixels."""
    from sklearn.datasets import load_sample_image

    photograph = torch.tensor(load_sample_image("china.jpg")).float().mean(-1) / 127.5 - 1
    target = functional.interpolate(photograph[None, None], size=(48, 48), mode="area").view(-1, 1)
    places = torch.cartesian_prod(*[torch.linspace(-1, 1, 48)] * 2)
    model = nn.Sequential(Sine(2, 64, True), Sine(64, 64), Sine(64, 64), nn.Linear(64, 1))
    nn.init.uniform_(
        model[-1].get_parameter("weight"), -math.sqrt(6 / 64) / 30, math.sqrt(6 / 64) / 30
    )
    losses = descend(model, make, lambda: functional.mse_loss(model(places), target), steps, decay)
    return {"first": losses[0], "value": statistics.fmean(losses[-3:])}


def perceptron(*widths: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return linear layers with activations between them."""
    layers = [
        part for i, o in itertools.pairwise(widths) for part in (nn.Linear(i, o), activation())
    ]
    return nn.Sequential(*layers[:-1])


class CartPole:
    """Episodes one after another, with a reward of 1 for each step.

    An episode ends when the pole falls, or after 500 steps.
    """

    def __init__(self) -> None:
        import gymnasium

        self.game, self.count, self.length = gymnasium.make("CartPole-v1"), 0, 0
        self.ended: list[tuple[int, int]] = []
        self.now = torch.from_numpy(self.game.reset(seed=torch.initial_seed())[0])

    def step(self, action: int) -> tuple[Tensor, bool, bool]:
        """Return the next observation, whether the pole fell, and whether the episode ended."""
        seen, _, fell, late, _ = self.game.step(action)
        following = self.now = torch.from_numpy(seen)
        self.length += 1
        if fell or late:
            self.ended.append((self.count, self.length))
            self.length, self.now = 0, torch.from_numpy(self.game.reset()[0])
        self.count += 1
        return following, fell, fell or late

    def returns(self) -> Result:
        """Return the mean return of the first and the last quarter of the training."""
        quarters = [[r for t, r in self.ended if a <= t / self.count < a + 0.25] for a in (0, 0.75)]
        return {
            "first": statistics.fmean(quarters[0]),
            "value": statistics.fmean(quarters[1] or [0.0]),
        }


def dqn(make: Make, steps: int = 6000) -> Result:
    """Train a DQN 4-120-84-2 at a constant learning rate.

    Every two steps there is one update of 128 transitions.
    """
    # observation, action, next observation, whether the pole fell
    game, memory = CartPole(), torch.zeros(steps, 10)
    online, target = (perceptron(4, 120, 84, 2) for _ in range(2))
    optimizer = make(online)
    for step in range(steps):
        if step % 250 == 0:
            target.load_state_dict(online.state_dict())
        before, action = game.now, int(torch.randint(2, ()))
        if float(torch.rand(())) >= max(0.05, 1 - step / (0.4 * steps)):
            action = int(online(before).argmax())
        following, fell, _ = game.step(action)
        memory[step] = torch.cat([before, torch.tensor([action]), following, torch.tensor([fell])])
        if step >= 500 and step % 2 == 0:
            batch = memory[torch.randint(step + 1, (128,))]
            with torch.no_grad():
                aim = 1 + 0.99 * (1 - batch[:, 9]) * target(batch[:, 5:9]).amax(1)
            functional.mse_loss(
                online(batch[:, :4]).gather(1, batch[:, 4:5].long())[:, 0], aim
            ).backward()
            optimizer.step()
            optimizer.zero_grad()
    return game.returns()


def ppo(make: Make, rounds: int = 40) -> Result:
    """Train PPO for 40 times 512 steps, with 4 epochs of 4 batches each and linear decay.

    The rest is as in CleanRL.
    """
    game = CartPole()
    actor, critic = (perceptron(4, 64, 64, outputs, activation=nn.Tanh) for outputs in (2, 1))
    both = nn.ModuleList([actor, critic])
    optimizer = make(both)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 - done / rounds)
    for _ in range(rounds):
        seen, actions, logs, goes_on = torch.zeros(513, 4), *torch.zeros(2, 512), torch.ones(512)
        with torch.no_grad():
            for t in range(512):
                choice = torch.distributions.Categorical(logits=actor(game.now))
                action = choice.sample()
                seen[t], actions[t], logs[t] = game.now, action, choice.log_prob(action)
                goes_on[t] = not game.step(int(action))[2]
            seen[512] = game.now
            values = critic(seen)[:, 0]
        gains, ahead = torch.zeros(512), torch.zeros(())
        for t in reversed(range(512)):
            gains[t] = ahead = 1 + 0.99 * goes_on[t] * (values[t + 1] + 0.95 * ahead) - values[t]
        aims = gains + values[:-1]
        for rows in (part for _ in range(4) for part in torch.randperm(512).chunk(4)):
            choice = torch.distributions.Categorical(logits=actor(seen[rows]))
            gain = (gains[rows] - gains[rows].mean()) / (gains[rows].std() + 1e-8)
            ratio = (choice.log_prob(actions[rows]) - logs[rows]).exp()
            policy = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
            error = functional.mse_loss(critic(seen[rows])[:, 0], aims[rows])
            (0.25 * error - policy - 0.01 * choice.entropy().mean()).backward()
            nn.utils.clip_grad_norm_(both.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
    return game.returns()


def gan(make: Make, steps: int = 600) -> Result:
    """Train a GAN on scikit-learn's digits at a constant learning rate.

    Both networks are trained with the optimizer.
    """
    from sklearn.datasets import load_digits

    digits = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    generator = nn.Sequential(*perceptron(16, 128, 128, 64), nn.Tanh())
    critic = perceptron(64, 128, 64, 1, activation=partial(nn.LeakyReLU, 0.2))
    optimizers, loss = (make(generator), make(critic)), functional.binary_cross_entropy_with_logits
    first = frechet(digits, generator(torch.randn(2000, 16)).detach())
    for _ in range(steps):
        real, false = digits[torch.randint(len(digits), (64,))], generator(torch.randn(64, 16))
        optimizers[1].zero_grad()
        (
            loss(critic(real), torch.ones(64, 1)) + loss(critic(false.detach()), torch.zeros(64, 1))
        ).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        loss(critic(false), torch.ones(64, 1)).backward()
        optimizers[0].step()
    return {"first": first, "value": frechet(digits, generator(torch.randn(2000, 16)).detach())}


def frechet(one: Tensor, other: Tensor) -> float:
    """Return the squared Fréchet distance between two samples' normal distributions.

    This is as in FID, but of the pixels.
    """
    one, other = one.double(), other.double()
    roots = torch.linalg.eigvals(one.T.cov() @ other.T.cov()).real.clamp(min=0).sqrt().sum()
    return float(
        (one.mean(0) - other.mean(0)).square().sum()
        + one.var(0).sum()
        + other.var(0).sum()
        - 2 * roots
    )


# ---- special weights, and sizes ------------------------------------------------------------------


class Transformer(nn.Module):
    """A causal pre-norm transformer on characters, heads of 16 columns."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, width // 16, 4 * width, 0.0, norm_first=True, batch_first=True
            )
            for _ in range(blocks)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, SYMBOLS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, codes: Tensor) -> Tensor:
        """Return the logits, (N, CONTEXT, SYMBOLS)."""
        x = self.symbols(codes) + self.places.weight
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(x))


def characters(make: Make, model: Transformer, reverse: bool = False) -> Result:
    """Train a transformer with 16 windows a step; 256 windows are held out."""
    (train,), (test,) = windows(True), windows(False)

    def loss_of(rows: Tensor) -> Tensor:
        return next_characters(model, (rows.flip(1) if reverse else rows,))

    losses = descend(
        model, make, lambda: loss_of(train[torch.randint(len(train), (16,))]), STEPS, True
    )
    with torch.no_grad():
        return {"first": losses[0], "value": loss_of(test[:256]).item()}


def transformer(blocks: int, width: int, make: Make) -> Result:
    """Train a transformer."""
    return characters(make, Transformer(blocks, width))


def lora(make: Make) -> Result:
    """Train a transformer with AdamW, then LoRA adapters in its MLPs on reversed text.

    The adapters have rank 4, and are trained on the same text read backwards.
    """
    model = Transformer(4, 64)
    characters(OPTIMIZERS["AdamW(3e-3)"], model)
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("linear1", "linear2"):
            setattr(block, name, Adapted(getattr(block, name)))
    return characters(make, model, reverse=True)


class Adapted(nn.Module):
    """A frozen linear layer with an adapter (Hu et al. 2022, section 4.1)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        down, up = (
            nn.Linear(base.in_features, 4, bias=False),
            nn.Linear(4, base.out_features, bias=False),
        )
        nn.init.zeros_(up.weight)
        self.base, self.apart = base, nn.Sequential(down, up)

    def forward(self, x: Tensor) -> Tensor:
        """Add the adapter's output."""
        return self.base(x) + self.apart(x)


def classifier(make: Make, *features: nn.Module, width: int) -> Result:
    """Train a classifier of Fashion-MNIST at 14 x 14, batch 256; 5,000 images are held out."""
    model = nn.Sequential(*features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    model = model.to(memory_format=torch.channels_last)
    (train, labels), (test, test_labels) = images(True), images(False)

    def loss_of() -> Tensor:
        chosen = torch.randint(len(train), (256,))
        return functional.cross_entropy(model(train[chosen]), labels[chosen])

    losses = descend(model, make, loss_of, STEPS, True)
    model.eval()
    with torch.no_grad():
        scores = torch.cat([model(part) for part in test[:5000].split(500)])
    return {
        "first": losses[0],
        "value": functional.cross_entropy(scores, test_labels[:5000]).item(),
    }


class Separable(nn.Sequential):
    """A depthwise separable convolution (MobileNet); its first part is the weights apart."""

    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        apart = nn.Conv2d(width, width, 3, 1 if width == wide else 2, 1, groups=width, bias=False)
        self.add_module("apart", nn.Sequential(apart))
        self.extend(
            [
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, wide, 1, bias=False),
                nn.BatchNorm2d(wide),
            ]
        )
        self.append(nn.ReLU())


def depthwise(make: Make) -> Result:
    """Train a network of six depthwise separable convolutions."""
    parts = [Separable(*widths) for widths in itertools.pairwise([32, 32, 64, 64, 128, 128, 128])]
    return classifier(
        make, nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), *parts, width=128
    )


def resnet(blocks: int, width: int, make: Make) -> Result:
    """Train a ResNet of 3 stages of ``blocks`` blocks, ``width`` to ``4 width`` channels wide."""
    widths = [width] * (blocks + 1) + [2 * width] * blocks + [4 * width] * blocks
    stages = [BasicBlock(i, o, 1 if i == o else 2) for i, o in itertools.pairwise(widths)]
    stem = (nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    return classifier(make, *stem, *stages, width=4 * width)


# ---- jobs and tables -----------------------------------------------------------------------------

CASES: dict[str, Callable[[Make], Result]] = {
    "SIREN, 100 steps, constant lr: loss": partial(siren, steps=100, decay=False),
    "SIREN, 300 steps, linear decay: loss": partial(siren, steps=300, decay=True),
    "DQN on CartPole: return": dqn,
    "PPO on CartPole: return": ppo,
    "GAN on digits: Fréchet distance of pixels": gan,
    "depthwise separable network: loss": depthwise,
    "LoRA, rank 4: loss": lora,
}
for blocks, width in ((4, 64), (8, 64), (16, 64), (4, 128), (4, 256)):
    CASES[f"transformer, {blocks} blocks of {width}, {6 * blocks + 1} matrices"] = partial(
        transformer, blocks, width
    )
for blocks, width in ((1, 8), (3, 8), (9, 8), (1, 16), (1, 32)):
    CASES[f"ResNet, {6 * blocks + 2} layers, {width} wide, {6 * blocks + 4} matrices"] = partial(
        resnet, blocks, width
    )
NAMES, KINDS = list(CASES), list(OPTIMIZERS)
FORMS = {"return": ".0f", "distance": ".1f", "SIREN": ".2g"}
# Each line: cases, optimizers, seeds.
TABLES = (
    (NAMES[:5], [KINDS[i] for i in (0, 3, 4, 5)], SEEDS),
    (NAMES[5:7], [KINDS[i] for i in (0, 1, 2, 3, 6)], SEEDS),
    (NAMES[7:], KINDS[7:], SEEDS[:1]),
)


def jobs(rows: dict[str, Result]) -> list[Job]:
    """Return all trainings."""
    return [
        {"case": case, "optimizer": name, "seed": seed}
        for cases, names, seeds in TABLES
        for case, name, seed in itertools.product(cases, names, seeds)
    ]


def run(job: Job) -> Result:
    """Train once; THOR raises FloatingPointError where gradients are not finite."""
    torch.set_num_threads(1)
    torch.manual_seed(job["seed"])
    try:
        return CASES[job["case"]](OPTIMIZERS[job["optimizer"]])
    except FloatingPointError as error:
        return {"failure": str(error)}


def optimizers(job: Job) -> list[str]:
    """Name ours: all but AdamW is ThorMuon."""
    return [] if job["optimizer"].startswith("AdamW") else ["ThorMuon"]


def table(rows: dict[str, Result]) -> str:
    """Return the tables, with the median and each seed's figure in each cell.

    What was not measured is left out.
    """
    parts = []
    for cases, names, seeds in TABLES:
        lines = []
        for case in cases:
            form = next((form for word, form in FORMS.items() if word in case), ".4f")
            found = {
                name: [
                    rows.get(key_of({"case": case, "optimizer": name, "seed": seed}), {})
                    for seed in seeds
                ]
                for name in names
            }
            if not all(all(own) for own in found.values()):
                continue
            worst = -math.inf if "return" in case else math.inf
            values = {name: [row.get("value", worst) for row in own] for name, own in found.items()}
            cells = [
                markdown.middle(own, form) if len(own) > 1 else markdown.number(own[0], form)
                for own in values.values()
            ]
            first = statistics.median(row.get("first", math.nan) for row in found[names[0]])
            lines.append([case, format(first, form), *cells])
            if len(seeds) == 1:
                lines[-1].append(
                    f"{values['lr 0.08'][0] / min(own[0] for own in values.values()):.3f}"
                )
        heads = [
            "case",
            "at first",
            *names,
            *(["lr 0.08 over the best"] if len(seeds) == 1 else []),
        ]
        parts.append(markdown.table(heads, lines))
    return "\n\n".join(parts).replace("never", "stopped")
