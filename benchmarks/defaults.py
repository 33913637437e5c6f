"""ThorMuon's defaults beyond the contests: SIREN, DQN, PPO, a GAN; special weights; one lr over depths and widths.

    python -m torch_thor.bench defaults          # runs what is missing (about half an hour of one core)
    python -m torch_thor.bench defaults --table

Cases. Each is trained with AdamW(1e-3), ``ThorMuon(model)``, and the same with a tighter bound of the
step (``max_update_ratio=0.05``) and without one (``None``), from the same weights, with three seeds. None of these
networks has more than 10 matrices, so the depth rule changes nothing here: the last setting is the step without both
rules.

Special weights. Depthwise convolutions, of which each channel is a matrix with one row, and the factors of LoRA
adapters are orthogonalised like every other weight, or trained by ThorMuon's AdamW (``layers="-*apart*"``); beside them
AdamW for the whole network, with three learning rates. Three seeds, 120 steps with linear decay.

Sizes. A pre-norm transformer on characters and a ResNet on Fashion-MNIST at 14 x 14 are trained for 120 steps with
linear decay, in several depths and widths, at the default learning rate, half of it and twice of it. The result is the
loss on held-out data.
"""

import itertools
import math
import statistics
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_thor import ThorMuon
from torch_thor.bench import markdown
from torch_thor.bench.stores import key_of
from torch_thor.training.data.small import load_characters, load_images
from torch_thor.training.models.small import BasicBlock
from torch_thor.training.recipe import Data

SEEDS = (0, 1, 2)
STEPS, CONTEXT, SYMBOLS = 120, 64, 128
Make = Callable[[nn.Module], torch.optim.Optimizer]
Result = dict[str, Any]

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "thor-muon": lambda model: ThorMuon(model),
    "bound0.05": lambda model: ThorMuon(model, max_update_ratio=0.05),
    "unbounded": lambda model: ThorMuon(model, max_update_ratio=None),
}
COMPARED = list(OPTIMIZERS)
OPTIMIZERS |= {
    "apart": lambda model: ThorMuon(model, layers="-*apart*"),
    "adamw3e-3": lambda model: torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-3),
    "adamw1e-2": lambda model: torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2),
}
SPECIAL = ("adamw", "adamw3e-3", "adamw1e-2", "thor-muon", "apart")
LRS = (0.04, 0.08, 0.16)
OPTIMIZERS |= {f"lr{lr:g}": partial(ThorMuon, lr=lr) for lr in LRS}


def descend(model: nn.Module, make: Make, loss_of: Callable[[], Tensor], steps: int, decay: bool) -> list[float]:
    """Train, and return the loss of every step."""
    optimizer, losses = make(model), []
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - decay * step / steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


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
    side = torch.linspace(-1, 1, 48)
    places = torch.cartesian_prod(side, side)
    model = nn.Sequential(Sine(2, 64, True), Sine(64, 64), Sine(64, 64), nn.Linear(64, 1))
    nn.init.uniform_(model[-1].weight, -math.sqrt(6 / 64) / 30, math.sqrt(6 / 64) / 30)
    losses = descend(model, make, lambda: functional.mse_loss(model(places), target), steps, decay)
    return {"first": losses[0], "value": statistics.fmean(losses[-3:])}


def perceptron(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return linear layers with activations between them."""
    layers = [part for i, o in itertools.pairwise(widths) for part in (nn.Linear(i, o), activation())]
    return nn.Sequential(*layers[:-1])


def _returns(episodes: list[tuple[int, float]], steps: int) -> Result:
    """Return the mean return of the first and the last quarter of the training."""
    first, last = ([r for t, r in episodes if start <= t / steps < start + 0.25] for start in (0, 0.75))
    return {"first": statistics.fmean(first), "value": statistics.fmean(last or [0.0])}


def dqn(make: Make, steps: int = 6000) -> Result:
    """Train a DQN 4-120-84-2 on CartPole, one update of 128 transitions for two steps, learning rate constant."""
    import gymnasium

    environment = gymnasium.make("CartPole-v1")
    online, target = (perceptron(4, 120, 84, 2) for _ in range(2))
    optimizer, episodes, total = make(online), [], 0.0
    memory = torch.zeros(steps, 11)  # observation, action, reward, next observation, whether the episode ended
    observation = torch.from_numpy(environment.reset(seed=torch.initial_seed())[0])
    for step in range(steps):
        if step % 250 == 0:
            target.load_state_dict(online.state_dict())
        action = int(torch.randint(2, ()))
        if float(torch.rand(())) >= max(0.05, 1 - step / (0.4 * steps)):
            with torch.no_grad():
                action = int(online(observation).argmax())
        following, reward, terminated, truncated, _ = environment.step(action)
        following = torch.from_numpy(following)
        memory[step] = torch.cat([observation, torch.tensor([action, reward]), following, torch.tensor([terminated])])
        total, observation = total + float(reward), following
        if terminated or truncated:
            episodes.append((step, total))
            total, observation = 0.0, torch.from_numpy(environment.reset()[0])
        if step >= 500 and step % 2 == 0:
            batch = memory[torch.randint(step + 1, (128,))]
            with torch.no_grad():
                aim = batch[:, 5] + 0.99 * (1 - batch[:, 10]) * target(batch[:, 6:10]).amax(1)
            values = online(batch[:, :4]).gather(1, batch[:, 4:5].long())[:, 0]
            optimizer.zero_grad()
            functional.mse_loss(values, aim).backward()
            optimizer.step()
    return _returns(episodes, steps)


def ppo(make: Make, rounds: int = 40) -> Result:
    """Train PPO on CartPole: 40 times 512 steps, 4 epochs of 4 batches each, linear decay, the rest as in CleanRL."""
    import gymnasium

    environment = gymnasium.make("CartPole-v1")
    actor, critic = (perceptron(4, 64, 64, outputs, activation=nn.Tanh) for outputs in (2, 1))
    both = nn.ModuleList([actor, critic])
    optimizer, episodes, total = make(both), [], 0.0
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 - done / rounds)
    now = torch.from_numpy(environment.reset(seed=torch.initial_seed())[0])
    for turn in range(rounds):
        seen, actions, logs, rewards, goes_on = torch.zeros(512, 4), *torch.zeros(3, 512), torch.ones(512)
        for t in range(512):
            with torch.no_grad():
                choice = torch.distributions.Categorical(logits=actor(now))
                action = choice.sample()
            seen[t], actions[t], logs[t] = now, action, choice.log_prob(action)
            after, reward, terminated, truncated, _ = environment.step(int(action))
            rewards[t], total = reward, total + float(reward)
            if terminated or truncated:
                episodes.append((turn * 512 + t, total))
                goes_on[t], total, after = 0, 0.0, environment.reset()[0]
            now = torch.from_numpy(after)
        with torch.no_grad():
            values = critic(torch.cat([seen, now[None]]))[:, 0]
        advantages, ahead = torch.zeros(512), torch.zeros(())
        for t in reversed(range(512)):
            ahead = rewards[t] + 0.99 * goes_on[t] * (values[t + 1] + 0.95 * ahead) - values[t]
            advantages[t] = ahead
        aims = advantages + values[:-1]
        for chosen in (part for _ in range(4) for part in torch.randperm(512).chunk(4)):
            choice = torch.distributions.Categorical(logits=actor(seen[chosen]))
            gain = (advantages[chosen] - advantages[chosen].mean()) / (advantages[chosen].std() + 1e-8)
            ratio = (choice.log_prob(actions[chosen]) - logs[chosen]).exp()
            policy = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
            error = functional.mse_loss(critic(seen[chosen])[:, 0], aims[chosen])
            optimizer.zero_grad()
            (0.25 * error - policy - 0.01 * choice.entropy().mean()).backward()
            nn.utils.clip_grad_norm_(both.parameters(), 0.5)
            optimizer.step()
        schedule.step()
    return _returns(episodes, 512 * rounds)


def gan(make: Make, steps: int = 600) -> Result:
    """Train a GAN on scikit-learn's digits, both networks with the optimizer, learning rate constant."""
    from sklearn.datasets import load_digits

    digits = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    generator = nn.Sequential(*perceptron(16, 128, 128, 64), nn.Tanh())
    critic = perceptron(64, 128, 64, 1, activation=partial(nn.LeakyReLU, 0.2))  # type: ignore[arg-type]
    optimizers, loss = (make(generator), make(critic)), functional.binary_cross_entropy_with_logits
    first = frechet(digits, generator(torch.randn(2000, 16)).detach())
    for _ in range(steps):
        real, false = digits[torch.randint(len(digits), (64,))], generator(torch.randn(64, 16))
        optimizers[1].zero_grad()
        (loss(critic(real), torch.ones(64, 1)) + loss(critic(false.detach()), torch.zeros(64, 1))).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        loss(critic(false), torch.ones(64, 1)).backward()
        optimizers[0].step()
    with torch.no_grad():
        false = generator(torch.randn(2000, 16))
        accuracy = ((critic(digits) > 0).float().mean() + (critic(false) < 0).float().mean()) / 2
    return {"first": first, "value": frechet(digits, false), "accuracy": accuracy.item()}


def frechet(one: Tensor, other: Tensor) -> float:
    """Return the squared Fréchet distance between two samples' normal distributions (as FID, of the pixels)."""
    one, other = one.double(), other.double()
    roots = torch.linalg.eigvals(one.T.cov() @ other.T.cov()).real.clamp(min=0).sqrt().sum()
    return float((one.mean(0) - other.mean(0)).square().sum() + one.var(0).sum() + other.var(0).sum() - 2 * roots)


class Transformer(nn.Module):
    """A causal pre-norm transformer on characters, heads of 16 columns."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 16, 4 * width, 0.0, norm_first=True, batch_first=True)
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


def transformer(make: Make, blocks: int, width: int, model: Transformer | None = None, reverse: bool = False) -> Result:
    """Train a transformer with 16 windows a step; 256 windows are held out."""
    model = model or Transformer(blocks, width)
    train, held_out = (part.clamp(max=SYMBOLS - 1) for part in load_characters())
    if reverse:
        train, held_out = train.flip(0), held_out.flip(0)

    def loss_of(codes: Tensor, starts: Tensor) -> Tensor:
        rows = codes[starts[:, None] + torch.arange(CONTEXT + 1)]
        return functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    losses = descend(model, make, lambda: loss_of(train, torch.randint(len(train) - CONTEXT, (16,))), STEPS, True)
    with torch.no_grad():
        return {"first": losses[0], "value": loss_of(held_out, torch.arange(256) * CONTEXT).item()}


class Adapted(nn.Module):
    """A frozen linear layer with a LoRA adapter of rank 4 (Hu et al. 2022, section 4.1)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        down, up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)
        nn.init.zeros_(up.weight)
        self.base, self.apart = base, nn.Sequential(down, up)

    def forward(self, x: Tensor) -> Tensor:
        """Add the adapter's output."""
        return self.base(x) + self.apart(x)


def lora(make: Make) -> Result:
    """Train a transformer with AdamW, then adapters in its MLPs on the same text read backwards, alone."""
    model = Transformer(4, 64)
    transformer(OPTIMIZERS["adamw3e-3"], 4, 64, model)
    model.requires_grad_(False)
    for block in model.blocks:
        block.linear1, block.linear2 = Adapted(block.linear1), Adapted(block.linear2)
    return transformer(make, 4, 64, model, reverse=True)


def depthwise(make: Make) -> Result:
    """Train a network of six depthwise separable convolutions (MobileNet) on Fashion-MNIST at 14 x 14, batch 256."""
    layers: dict[str, nn.Module] = {"stem": nn.Conv2d(1, 32, 3, padding=1, bias=False), "norm": nn.BatchNorm2d(32)}
    for i, (width, wide) in enumerate(itertools.pairwise([32, 32, 64, 64, 128, 128, 128])):
        stride = 1 if width == wide else 2
        layers[f"apart{i}"] = nn.Conv2d(width, width, 3, stride, 1, groups=width, bias=False)
        layers |= {f"norm{i}": nn.BatchNorm2d(width), f"relu{i}": nn.ReLU()}
        layers |= {f"conv{i}": nn.Conv2d(width, wide, 1, bias=False), f"normed{i}": nn.BatchNorm2d(wide)}
        layers[f"out{i}"] = nn.ReLU()
    layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flat": nn.Flatten(), "head": nn.Linear(128, 10)}
    return images(make, nn.Sequential(OrderedDict(layers)))


def resnet(make: Make, blocks: int, width: int) -> Result:
    """Train a ResNet of 3 stages with so many blocks each, ``width`` to ``4 width`` channels wide, batch 256."""
    widths = [width] * (blocks + 1) + [2 * width] * blocks + [4 * width] * blocks
    stages = [BasicBlock(i, o, 1 if i == o else 2) for i, o in itertools.pairwise(widths)]
    stem = [nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10)]
    return images(make, nn.Sequential(*stem, *stages, *pool))


def images(make: Make, model: nn.Module) -> Result:
    """Train a classifier of small images."""
    model = model.to(memory_format=torch.channels_last)
    (train, labels), (test, test_labels) = load_images(Data(name="fashion-mnist"))
    train, test = functional.avg_pool2d(train, 2), functional.avg_pool2d(test[:5000], 2)

    def loss_of() -> Tensor:
        chosen = torch.randint(len(train), (256,))
        return functional.cross_entropy(model(train[chosen]), labels[chosen])

    losses = descend(model, make, loss_of, STEPS, True)
    model.eval()
    with torch.no_grad():
        scores = torch.cat([model(part) for part in test.split(500)])
    return {"first": losses[0], "value": functional.cross_entropy(scores, test_labels[:5000]).item()}


CASES: dict[str, Callable[[Make], Result]] = {
    "siren": partial(siren, steps=100, decay=False),
    "siren-decay": partial(siren, steps=300, decay=True),
    "dqn": dqn,
    "ppo": ppo,
    "gan": gan,
    "depthwise": depthwise,
    "lora": lora,
}
# Each line: a name, the case, the entry of its results, their format, and whether more is better.
LINES = (
    ("SIREN, 100 steps, constant lr: loss", "siren", "value", ".2g", False),
    ("SIREN, 300 steps, linear decay: loss", "siren-decay", "value", ".2g", False),
    ("DQN on CartPole: return", "dqn", "value", ".0f", True),
    ("PPO on CartPole: return", "ppo", "value", ".0f", True),
    ("GAN on digits: Fréchet distance of pixels", "gan", "value", ".1f", False),
    ("… accuracy of the discriminator", "gan", "accuracy", ".3f", False),
)
NETWORKS = {"transformer": (transformer, (4, 8, 16), 64), "resnet": (resnet, (1, 3, 9), 8)}
SIZES = [
    (name, blocks, factor * width)
    for name, (_, depths, width) in NETWORKS.items()
    for blocks, factor in [(depths[0], 1), (depths[1], 1), (depths[2], 1), (depths[0], 2), (depths[0], 4)]
]
CASES |= {f"{n}-{b}x{w}": partial(NETWORKS[n][0], blocks=b, width=w) for n, b, w in SIZES}


Job = dict[str, Any]
Rows = dict[str, Result]


def trainings(case: str, name: str) -> list[Job]:
    """Return the trainings of a case with an optimizer: all seeds, of the sizes the first only."""
    return [{"case": case, "optimizer": name, "seed": seed} for seed in (SEEDS[:1] if name.startswith("lr") else SEEDS)]


def jobs(rows: Rows) -> list[Job]:
    """Return all trainings."""
    pairs = [(case, name) for _, case, entry, *_ in LINES if entry == "value" for name in COMPARED]
    pairs += [(case, name) for case in ("depthwise", "lora") for name in SPECIAL]
    pairs += [(f"{n}-{b}x{w}", f"lr{lr:g}") for n, b, w in SIZES for lr in LRS]
    return [job for case, name in pairs for job in trainings(case, name)]


def run(job: Job) -> Result:
    """Train once; THOR raises FloatingPointError where gradients are not finite."""
    torch.set_num_threads(1)
    torch.manual_seed(job["seed"])
    try:
        return CASES[job["case"]](OPTIMIZERS[job["optimizer"]])
    except FloatingPointError as error:
        return {"failure": str(error)}


def table(rows: Rows) -> str:
    """Return the tables; what was not measured is left out."""

    def values(case: str, name: str, entry: str, otherwise: float) -> list[float]:
        found = [rows.get(key_of(job), {}) for job in trainings(case, name)]
        return [row.get(entry, otherwise) for row in found] if all(found) else []

    def cell(case: str, name: str, entry: str, form: str, higher: bool) -> str:
        """Return the median and each seed's figure; one that is missing is the worst."""
        own = values(case, name, entry, -math.inf if higher else math.inf)
        return markdown.middle(own, form).replace("never", "stopped") if own else ""

    lines = []
    for title, case, entry, form, higher in LINES:
        first = values(case, "adamw", "first", math.inf)
        at_first = format(statistics.median(first), form) if first and entry == "value" else ""
        lines.append([title, at_first, *(cell(case, name, entry, form, higher) for name in COMPARED)])
    heads = ("case", "at first", "AdamW(1e-3)", "ThorMuon, defaults", "… bound 0.05", "… without a bound")
    parts, lines = [markdown.table(heads, lines)], []
    for title, case in (("depthwise separable network: loss", "depthwise"), ("LoRA, rank 4: loss", "lora")):
        lines.append([title, *(cell(case, name, "value", ".4f", False) for name in SPECIAL)])
    heads = ("case", "AdamW(1e-3)", "AdamW(3e-3)", "AdamW(1e-2)", "ThorMuon, defaults", "… these weights by AdamW")
    parts, lines = [*parts, markdown.table(heads, lines)], []
    for name, blocks, width in SIZES:
        losses = [loss for lr in LRS for loss in values(f"{name}-{blocks}x{width}", f"lr{lr:g}", "value", math.inf)]
        title, matrices = f"transformer, {blocks} blocks", 6 * blocks + 1
        if name == "resnet":
            title, matrices = f"ResNet, {6 * blocks + 2} layers", 6 * blocks + 4
        if len(losses) == len(LRS):
            cells = [title, f"{width}", f"{matrices}", *(markdown.number(loss, ".4f") for loss in losses)]
            lines.append([*cells, f"{losses[1] / min(losses):.3f}"])
    heads = ("network", "width", "matrices", *(f"lr {lr:g}" for lr in LRS), "lr 0.08 over the best")
    return "\n\n".join([*parts, markdown.table(heads, lines)])
