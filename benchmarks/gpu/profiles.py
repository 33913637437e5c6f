"""What an optimizer asks of a GPU: kernels and synchronisations of its step, memory, and times.

THOR and ThorMuon, between refreshes and with a refresh of all layers in every step, are profiled
beside torch's fused AdamW, and beside torch's Muon with fused AdamW for what is no matrix.

- Kernels, waits and copies are counted in one `optimizer.step()`, which begins when the device has
  nothing left to do. A wait is a call of the host that returns only when the device has got so
  far. A copy is counted if it goes to the host, or comes from memory that is not pinned: such a
  copy can make the host wait. A number that is read, as by `.item()`, is a copy and a wait.
- Memory is what a whole step has allocated at most: weights, gradients, state, batch and
  activations.
- All optimizers take turns, step by step; the times are medians.
"""

import gc
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks import step_time
from benchmarks.runner.machine import DEVICE, synchronize
from benchmarks.runner.markdown import table as markdown
from benchmarks.runner.timing import take_turns
from torch_thor.training.muon import MuonAdamW

STEP = "the step of the optimizer"  # its name in the profile
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
WARM_UP = 2  # steps that nothing is measured of: the first refreshes, and allocates the state
HEADS = ("optimizer", "layers refreshed", "kernels", "waits", "copies", "peak memory, GB")


def muon(model: nn.Module) -> torch.optim.Optimizer:
    """Make torch's Muon, with fused AdamW for what is no matrix."""
    made = MuonAdamW(model, lr=step_time.SMALL, adamw_embeddings=True)
    for group in made.param_groups:
        if group["algorithm"] == "adamw":
            group["fused"] = True
    return made


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Make torch's AdamW, in one kernel for many parameters."""
    return torch.optim.AdamW(model.parameters(), lr=step_time.SMALL, fused=True)


OURS = ("THOR", "THOR, refresh", "ThorMuon", "ThorMuon, refresh")
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    **{name: step_time.OPTIMIZERS[name] for name in OURS},
    "AdamW, fused": fused_adamw,
    "Muon, AdamW fused": muon,
}


class Contender:
    """A network of its own with one of the optimizers.

    Args:
        optimizer: The optimizer of the network.
        loss: Returns the loss of a batch.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> None:
        self.optimizer, self.loss = optimizer, loss
        self.step_ms: list[float] = []
        self.optimizer_ms: list[float] = []

    def step(self) -> None:
        """Take a whole step, and note the time of it and of the optimizer."""
        start, before, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        start.record()
        self.loss().backward()
        before.record()
        self.optimizer.step()
        end.record()
        self.optimizer.zero_grad()
        synchronize()
        self.step_ms.append(start.elapsed_time(end))
        self.optimizer_ms.append(before.elapsed_time(end))

    def peak_bytes(self, others: int) -> int:
        """Take a step, and return the most that is allocated in it without the bytes of others."""
        torch.cuda.reset_peak_memory_stats()
        self.step()
        return torch.cuda.max_memory_allocated() - others

    def counts(self) -> dict[str, Any]:
        """Take a step, and count the layers that it refreshes and what the profiler sees of it."""
        self.loss().backward()
        synchronize()
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with profile(activities=activities) as seen, record_function(STEP):
            self.optimizer.step()
        self.optimizer.zero_grad()
        events = getattr(self.optimizer, "last_refresh", ())
        refreshed = sum(event.decision.name == "UPDATE" for event in events)
        return {**counted(seen.events() or []), "refreshed": refreshed}


def counted(events: Sequence[FunctionEvent]) -> dict[str, Any]:
    """Count the kernels, and waits and copies by name, in a profile of the optimizer's step.

    The profiler's own calls before and after the step do not count.
    """
    calls = [event for event in events if event.device_type == DeviceType.CPU]
    step = next(event.time_range for event in calls if event.name == STEP)
    inside = [event.name for event in calls if step.start <= event.time_range.start < step.end]
    # the range of the step is an event of the device too
    work = [
        event.name
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    copies = [name for name in work if name.startswith("Memcpy")]
    return {
        "kernels": sum(not name.startswith(("Memcpy", "Memset")) for name in work),
        "waits": dict(Counter(name for name in inside if name in WAITS)),
        "copies": dict(Counter(name for name in copies if "DtoH" in name or "Pageable" in name)),
    }


# ---- all of them ---------------------------------------------------------------------------------


def jobs() -> list[dict[str, Any]]:
    """List the networks."""
    sizes = (("resnet50", 256, 224), ("bert-base", 64, 128), ("gpt2", 8, 1024))
    return [
        {"model": name, "batch": batch, "side": side, "rounds": 10} for name, batch, side in sizes
    ]


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Profile all optimizers on a network, and time them in turns."""
    network = partial(step_time.network, job["model"], DEVICE, job["batch"], job["side"])
    network()[1]().backward()  # libraries keep workspaces from their first call on
    contenders, peaks = {}, {}
    for name, make in OPTIMIZERS.items():
        gc.collect()
        others = torch.cuda.memory_allocated()
        model, loss = network()
        own = contenders[name] = Contender(make(model), loss)
        for _ in range(WARM_UP):
            own.step()
        peaks[name] = own.peak_bytes(others)
        own.step_ms.clear()
        own.optimizer_ms.clear()
    take_turns({name: own.step for name, own in contenders.items()}, job["rounds"], warm_up=0)
    next(iter(contenders.values())).counts()  # the first profile contains the profiler's start
    rows = {
        name: {
            "peak_bytes": peaks[name],
            "step_ms": list(own.step_ms),
            "optimizer_ms": list(own.optimizer_ms),
            **own.counts(),
        }
        for name, own in contenders.items()
    }
    return {"optimizers": rows}


def table(rows: list[dict[str, Any]]) -> str:
    """Return a table for each network, with a line for each optimizer."""
    parts = []
    for row in rows:
        lines = [
            [
                optimizer,
                str(own["refreshed"]),
                str(own["kernels"]),
                str(sum(own["waits"].values())),
                str(sum(own["copies"].values())),
                f"{own['peak_bytes'] / 1e9:.2f}",
                f"{statistics.median(own['step_ms']):.2f}",
                f"{statistics.median(own['optimizer_ms']):.2f}",
            ]
            for optimizer, own in row["optimizers"].items()
        ]
        title = f"### Profile of {row['job']['model']}, batch {row['job']['batch']}"
        parts += [title, markdown((*HEADS, "step, ms", "optimizer.step, ms"), lines)]
    return "\n\n".join(parts)
