"""What THOR sends on many processes beside Shampoo and Muon, and weak scaling on local processes beside SGD and AdamW.

    python benchmarks/many_devices.py                  # both parts, a few minutes
    python benchmarks/many_devices.py --part bytes     # computed, nothing is trained
    python benchmarks/many_devices.py --table          # tables and figure alone, from the raw data

The bytes are those that one process sends, with rings: THOR's on a refresh in which all layers take new factors, those
of Shampoo and Muon in every step, in addition to the gradients (docs/measurements/many-devices.md has the formulas).

Weak scaling: BERT-mini (64 tokens, 8 samples for each process) on 1, 2 and 4 processes with one thread each (gloo).
In each of several rounds a session with each number of processes is started in turn, in which four trainings take
turns: SGD and THOR with DDP, AdamW and THOR with FSDP2. The result is the time of a step over that on one process in
the same round. Times are those that pass, so on a machine with fewer cores than processes they are longer by that.
"""

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from local_ranks import loss, made, on_ranks, parallel, thor
from torch_thor import THOR
from torch_thor.bench import describe, write_json
from torch_thor.bench.drawing import note, save
from torch_thor.bench.markdown import table
from torch_thor.curvature import LayerCurvature
from torch_thor.distributed.ownership import deal_out, pads
from torch_thor.tools.traffic import Collective, blocks_of, collectives_of_refresh, collectives_of_training, laid_out

ROOT = Path(__file__).parent
FOLDER, FIGURE = ROOT / "results" / "plan", ROOT.parent / "docs" / "images" / "many_devices.png"
MODELS, COUNTS, WORLDS = ("resnet50", "bert-large"), (8, 64, 256), (1, 2, 4)
SPLIT, INTERVAL, CPU = 128, 100, torch.device("cpu")
SCALED, LENGTH, LOCAL = "bert-mini", 64, 8
FORMS = {"sgd ddp": "SGD, DDP", "thor ddp": "THOR, DDP", "adamw fsdp": "AdamW, FSDP2", "thor fsdp": "THOR, FSDP2"}


def unpacked_bytes(layers: list[LayerCurvature], processes: int) -> int:
    """Count what a refresh would send with whole blocks in the place of lower triangles.

    Args:
        layers: The layers.
        processes: Number of processes.

    Returns:
        Bytes that one process sends.
    """
    blocks = blocks_of(layers)
    bounds = deal_out(tuple(one.shape for one in blocks), processes)
    sizes = [0] * processes
    for one, of_ranks in zip(blocks, bounds, strict=True):
        for rank in range(processes):
            sizes[rank] += (of_ranks[rank + 1] - of_ranks[rank]) * one.shape[1] ** 2
    once = processes * max(sizes) if pads(sizes) else 2 * sum(sizes)
    return 3 * 4 * once * (processes - 1) // processes  # sums; then factors and inverses; float32


def matrix_elements(model: nn.Module) -> int:
    """Count the elements that Muon trains: weights of two and more dimensions but embeddings and classifiers.

    Args:
        model: The model.

    Returns:
        Their number.
    """
    left_out = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]  # of classes, or of pairs
    left_out.add(id(last.weight))
    return sum(p.numel() for p in model.parameters() if p.dim() > 1 and id(p) not in left_out)


def bytes_of(word: str) -> dict[str, Any]:
    """Count the bytes of all forms for a model.

    Args:
        word: The model.

    Returns:
        Its numbers of elements, and for each number of processes the bytes by form.
    """
    with torch.device("meta"):
        model = made(word, 1, 224, 128).model
    split, whole = (list(THOR(model, split_dim=size).curvature.values()) for size in (SPLIT, None))
    elements, matrices = sum(p.numel() for p in model.parameters()), matrix_elements(model)
    found: dict[str, Any] = {"elements": elements, "matrix_elements": matrices, "processes": {}}
    for n in COUNTS:
        with laid_out(split, n, shards=n) as sharded:
            sent_sharded = _sent(collectives_of_refresh(sharded, n))
        found["processes"][str(n)] = {
            "gradients": _sent(collectives_of_training(model, n)),
            "thor": _sent(collectives_of_refresh(split, n)),
            "thor unpacked": unpacked_bytes(split, n),
            "thor unsplit": _sent(collectives_of_refresh(whole, n)),
            "shampoo": 4 * elements * (n - 1) // n,
            "muon": 4 * matrices * (n - 1) // n,
            "thor sharded": sent_sharded,
            "muon sharded": 2 * 2 * matrices * (n - 1) // n**2,
        }
    return found


def _sent(collectives: list[Collective]) -> int:
    """Return the bytes that one process sends."""
    return sum(one.sent for one in collectives)


def scaled(rank: int, world: int, rounds: int) -> dict[str, list[float]]:
    """Time steps in one session.

    Args:
        rank: Rank of this process.
        world: Number of processes.
        rounds: Number of steps that count, with and without refresh each.

    Returns:
        Seconds by training; THOR's refreshes under their own name.
    """
    warnings.simplefilter("ignore")
    steps: dict[str, Any] = {}
    for name in FORMS:
        sample = made(SCALED, LOCAL, 0, LENGTH)
        model = parallel(sample.model, world, sharded=name.endswith("fsdp"))
        parameters = sample.model.parameters()
        if name.startswith("thor"):
            optimizer: torch.optim.Optimizer = thor(sample.model)
        elif name.startswith("sgd"):
            optimizer = torch.optim.SGD(parameters, lr=1e-6, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(parameters, lr=1e-6)
        steps[name] = (sample, model, optimizer)
    seconds: dict[str, list[float]] = {}
    for turn in range(2 * (rounds + 1)):
        for name, (sample, model, optimizer) in steps.items():
            dist.barrier()
            started = time.perf_counter()
            loss(model, sample).backward()
            optimizer.step()
            dist.barrier()
            ended = time.perf_counter()
            optimizer.zero_grad()
            if turn >= 2:
                refreshed = name.startswith("thor") and turn % 2 == 0
                seconds.setdefault(f"{name} refresh" if refreshed else name, []).append(ended - started)
    return seconds


def scaling_ratios(raw: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Compare the time of a step with that on one process.

    Args:
        raw: The raw data.

    Returns:
        By training and number of processes, one ratio for each round.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for sessions in raw["rounds"]:
        middle = {
            world: {name: statistics.median(times) for name, times in seconds.items()}
            for world, seconds in sessions.items()
        }
        for name in FORMS:
            for world in sessions:
                taken = [_step(middle[at], name) for at in (world, "1")]
                found.setdefault(name, {}).setdefault(world, []).append(taken[0] / taken[1])
    return found


def _step(seconds: dict[str, float], name: str) -> float:
    """Return the mean time of a step with a refresh in every 100th."""
    own = seconds[name]
    return own + (seconds.get(f"{name} refresh", own) - own) / INTERVAL


def bytes_table(raw: dict[str, Any]) -> str:
    """Make the table of bytes.

    Args:
        raw: The raw data.

    Returns:
        Markdown, in MB.
    """
    columns = ("thor", "thor unpacked", "thor unsplit", "thor sharded", "gradients", "shampoo", "muon", "muon sharded")
    heads = ("THOR", "unpacked", "unsplit", "THOR, FSDP2", "gradients", "Shampoo", "Muon", "Muon, FSDP2")
    rows = []
    for word, found in raw["models"].items():
        for n, sent in found["processes"].items():
            rows.append([word, n, *(f"{sent[name] / 1e6:,.1f}" for name in columns)])
    return table(["model", "processes", *heads], rows)


def scaling_table(raw: dict[str, Any]) -> str:
    """Make the table of weak scaling.

    Args:
        raw: The raw data.

    Returns:
        Markdown.
    """
    rows = []
    for name, worlds in scaling_ratios(raw).items():
        cells = [
            f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"
            for world, values in worlds.items()
            if world != "1"
        ]
        rows.append([FORMS[name], *cells])
    return table(["training", *(f"{world} processes" for world in raw["rounds"][0] if world != "1")], rows)


def draw(counted: dict[str, Any], timed: dict[str, Any], path: Path) -> None:
    """Draw bytes for each step, and weak scaling.

    Args:
        counted: Raw data of the bytes.
        timed: Raw data of the scaling.
        path: The file.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    found = counted["models"]["bert-large"]["processes"]["64"]
    bars = {
        "gradients": found["gradients"],
        "Shampoo": found["shampoo"],
        "Muon": found["muon"],
        "THOR unsplit": found["thor unsplit"] / INTERVAL,
        "THOR unpacked": found["thor unpacked"] / INTERVAL,
        "THOR": found["thor"] / INTERVAL,
        "Muon, FSDP2": found["muon sharded"],
        "THOR, FSDP2": found["thor sharded"] / INTERVAL,
    }
    left.barh(list(bars), [size / 1e6 for size in bars.values()], color="#0072b2")
    left.set(xscale="log", xlabel="MB that a process sends for each step", title="BERT-large on 64 processes")
    left.invert_yaxis()
    for name, worlds in scaling_ratios(timed).items():
        style = "--" if name.endswith("fsdp") else "-"
        colour = "#009e73" if name.startswith("thor") else "#666666"
        middle = [statistics.median(values) for values in worlds.values()]
        right.plot([int(world) for world in worlds], middle, ls=style, color=colour, marker="o", label=FORMS[name])
    right.set(xlabel="processes, one thread each", ylabel="time of a step over that on one process")
    right.set(title="Weak scaling of BERT-mini on two cores", xticks=WORLDS)
    right.legend()
    note(figure, f"THOR refreshes every {INTERVAL} steps")
    save(figure, path)


def main() -> None:
    """Count, measure, write the raw data, print the tables and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("bytes", "scaling"), help="one part alone")
    parser.add_argument("--table", action="store_true", help="tables and figure alone, from the raw data")
    parser.add_argument("--rounds", type=int, default=4, help="sessions with each number of processes")
    parser.add_argument("--steps", type=int, default=5, help="steps of each kind in a session")
    options = parser.parse_args()
    counted, timed = FOLDER / "bytes.json", FOLDER / "scaling.json"
    if not options.table and options.part != "scaling":
        settings = {"split_dim": SPLIT, "dtype": "float32", "interval": INTERVAL}
        raw = {"machine": describe(), "settings": settings, "models": {word: bytes_of(word) for word in MODELS}}
        write_json(counted, raw, indent=1)
    if not options.table and options.part != "bytes":
        settings = {"model": SCALED, "length": LENGTH, "local_batch": LOCAL, "steps": options.steps, "seed": 0}
        machine, rounds = {**describe(), "threads": 1}, []
        for i in range(options.rounds):
            order = WORLDS if i % 2 == 0 else WORLDS[::-1]
            sessions = {str(world): on_ranks(world, scaled, options.steps)[0] for world in order}
            rounds.append({str(world): sessions[str(world)] for world in WORLDS})
            write_json(timed, {"machine": machine, "settings": settings, "rounds": rounds}, indent=1)
            print(f"round {i + 1}: done", flush=True)
    if counted.exists():
        print(bytes_table(json.loads(counted.read_text())))
    if timed.exists():
        print(scaling_table(json.loads(timed.read_text())))
    if counted.exists() and timed.exists():
        draw(json.loads(counted.read_text()), json.loads(timed.read_text()), FIGURE)


if __name__ == "__main__":
    main()
