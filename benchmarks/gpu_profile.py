"""What an optimizer asks of a GPU: kernels and synchronisations of its step, memory, and times.

THOR and ThorMuon, between refreshes and with a refresh of all layers in every step, are profiled
beside torch's fused AdamW, and beside torch's Muon with fused AdamW for what is no matrix. As
MuonAdamW has it, the weight of a convolution is a matrix too, and embeddings are AdamW's.

- Kernels, waits and copies are counted in one `optimizer.step()`, which begins when the device has
  nothing left to do. A wait is a call of the host that returns only when the device has got so
  far. A copy is one to the host, or one from memory that is not pinned: such a copy can make the
  host wait. A number that is read, as by `.item()`, is counted as a copy and as a wait.
- Memory is what a whole step has allocated at most: weights, gradients, state, batch and
  activations.
- All optimizers take turns, step by step; the times are medians.

A CPU has no kernels, and nothing waits for it. There ATen operators are counted, those that others
call included, and of these the ones that read a number, which fused AdamW does on a CPU only.
"""

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks import step_time
from benchmarks.runner.markdown import table as markdown
from benchmarks.runner.timing import take_turns
from torch_thor import THOR, ThorMuon
from torch_thor.training.muon import MuonAdamW

Make = Callable[[nn.Module], torch.optim.Optimizer]
SINGLE_PROCESS = "the optimizer alone"  # its step in the profile
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
READING = "aten::_local_scalar_dense"
# steps that nothing is measured of: the first refreshes, and allocates the state
WARM_UP = 2


def ours(kind: type[THOR] | type[ThorMuon], interval: int) -> Make:
    """Return what makes one of ours, with such a number of steps between refreshes."""

    def made(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = kind(model, lr=step_time.SMALL, weight_decay=0.01, update_interval=interval)
        # a refresh of THOR takes new factors, however little they differ
        for group in optimizer.param_groups:
            if "trace_thresholds" in group:
                group["trace_thresholds"] = (0.0, 0.0)
        return optimizer

    return made


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Make torch's AdamW, in one kernel for many parameters."""
    return torch.optim.AdamW(model.parameters(), lr=step_time.SMALL, fused=True)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    """Make torch's Muon, with fused AdamW for what is no matrix."""
    made = MuonAdamW(model, lr=step_time.SMALL, adamw_embeddings=True)
    for group in made.param_groups:
        if group["algorithm"] == "adamw":
            group["fused"] = True
    return made


OPTIMIZERS: dict[str, Make] = {
    "THOR": ours(THOR, step_time.NEVER),
    "THOR, refresh": ours(THOR, 1),
    "ThorMuon": ours(ThorMuon, step_time.NEVER),
    "ThorMuon, refresh": ours(ThorMuon, 1),
    "AdamW, fused": fused_adamw,
    "Muon, AdamW fused": muon,
}


# ---- networks ------------------------------------------------------------------------------------


def build(name: str) -> nn.Module:
    """Build a network with random weights: GPT-2 of 12 layers of 768, or one of step_time.py."""
    if not name.startswith("gpt2"):
        return step_time.build(name)
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    tiny: dict[str, Any] = {"n_embd": 32, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**({} if name == "gpt2" else tiny)))


def loss_of(
    name: str, model: nn.Module, device: torch.device, batch: int, side: int
) -> Callable[[], Tensor]:
    """Return the loss of a random batch, which is drawn anew each time."""
    fast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    def of_texts() -> Tensor:
        tokens = torch.randint(30_000, (batch, side), device=device)
        return model(input_ids=tokens, labels=tokens).loss  # GPT-2 moves the labels itself

    def of_images() -> Tensor:
        images = torch.randn(batch, 3, side, side, device=device)
        labels = torch.randint(1000, (batch,), device=device)
        return functional.cross_entropy(model(images.to(memory_format=torch.channels_last)), labels)

    return fast(of_texts if name.startswith(("bert", "gpt2")) else of_images)


# ---- one optimizer -------------------------------------------------------------------------------


class Contender:
    """A network of its own with one of the optimizers.

    Args:
        make: Makes the optimizer.
        model: The network, on the device.
        loss: Returns the loss of a batch.
        device: The device.
    """

    def __init__(
        self,
        make: Make,
        model: nn.Module,
        loss: Callable[[], Tensor],
        device: torch.device,
    ) -> None:
        self.optimizer, self.loss, self.device = make(model), loss, device
        self.step_ms: list[float] = []
        self.optimizer_ms: list[float] = []

    def step(self) -> None:
        """Take a whole step, and note the time of it and of the optimizer."""
        start = moment(self.device)
        self.loss().backward()
        before = moment(self.device)
        self.optimizer.step()
        end = moment(self.device)
        self.optimizer.zero_grad()
        synchronise(self.device)
        self.step_ms.append(milliseconds(start, end))
        self.optimizer_ms.append(milliseconds(before, end))

    def counts(self) -> dict[str, Any]:
        """Take a step, and count the layers that it refreshes and what the profiler sees of it."""
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self.loss().backward()
        synchronise(self.device)
        with profile(activities=activities) as seen, record_function(SINGLE_PROCESS):
            self.optimizer.step()
        self.optimizer.zero_grad()
        events = getattr(self.optimizer, "last_refresh", ())
        refreshed = sum(event.decision.name == "UPDATE" for event in events)
        return {**counted(seen.events() or [], self.device), "refreshed": refreshed}

    def peak_bytes(self, others: int) -> int | None:
        """Take a step, and return the most that is allocated in it; None on a CPU.

        Args:
            others: Bytes that others hold.
        """
        if self.device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats()
        self.step()
        return torch.cuda.max_memory_allocated() - others

    def forget_times(self) -> None:
        """Drop the times of the steps so far."""
        self.step_ms.clear()
        self.optimizer_ms.clear()

    def row(self) -> dict[str, Any]:
        """Return the times and the counts."""
        times = {"step_ms": list(self.step_ms), "optimizer_ms": list(self.optimizer_ms)}
        return {**times, **self.counts()}


def moment(device: torch.device) -> Any:
    """Return the time at which the device gets here."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(start: Any, end: Any) -> float:
    """Return the time between two moments, both of which are over."""
    if isinstance(start, float):
        return 1000 * (end - start)
    return float(start.elapsed_time(end))


def synchronise(device: torch.device) -> None:
    """Wait until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def allocated(device: torch.device) -> int:
    """Return the bytes that are allocated on a GPU, without those of garbage."""
    gc.collect()
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


# ---- what the profiler has seen ------------------------------------------------------------------


def counted(events: Sequence[FunctionEvent], device: torch.device) -> dict[str, Any]:
    """Count the events of the optimizer's step.

    Args:
        events: Those of a profile that contains nothing else, but for the profiler's own calls
            before and after the step.
        device: Where the step was.

    Returns:
        The number of kernels, and the numbers of waits and copies by their names.
    """
    calls = calls_within(events)
    if device.type != "cuda":
        operators = sum(name.startswith("aten::") for name in calls)
        return {"kernels": operators, "waits": chosen(calls, reads), "copies": {}}
    # the step's range is an event of the device too
    work = [
        event.name
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    return {
        "kernels": sum(not name.startswith(("Memcpy", "Memset")) for name in work),
        "waits": chosen(calls, waits),
        "copies": chosen(work, can_wait),
    }


def calls_within(events: Iterable[FunctionEvent]) -> list[str]:
    """Return the names of what the host called in the step; the profiler waits after it."""
    calls = [event for event in events if event.device_type == DeviceType.CPU]
    step = next(event.time_range for event in calls if event.name == SINGLE_PROCESS)
    return [event.name for event in calls if step.start <= event.time_range.start < step.end]


def chosen(names: Iterable[str], which: Callable[[str], bool]) -> dict[str, int]:
    """Return how often each of the chosen names is there."""
    return dict(Counter(filter(which, names)))


def waits(name: str) -> bool:
    """Return whether in this call the host waits for a GPU."""
    return name in WAITS


def can_wait(name: str) -> bool:
    """Return whether this work of a GPU is a copy for which the host may have to wait."""
    return name.startswith("Memcpy") and ("DtoH" in name or "Pageable" in name)


def reads(name: str) -> bool:
    """Return whether this operator gives a number to Python."""
    return name == READING


# ---- all of them ---------------------------------------------------------------------------------


def measure(
    name: str, device: torch.device, batch: int, side: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """Profile all optimizers on a network, and time them in turns.

    Args:
        name: The network.
        device: Where.
        batch: Samples in a batch.
        side: Pixels of a side, or tokens.
        rounds: Steps of each optimizer that are timed.

    Returns:
        The row of each optimizer.
    """
    # libraries keep workspaces from their first call on: no optimizer's memory
    network(name, device, batch, side)[1]().backward()
    contenders, peaks = {}, {}
    for optimizer, make in OPTIMIZERS.items():
        others = allocated(device)
        one = contenders[optimizer] = Contender(make, *network(name, device, batch, side), device)
        for _ in range(WARM_UP):
            one.step()
        peaks[optimizer] = one.peak_bytes(others)
        one.forget_times()
    take_turns({optimizer: one.step for optimizer, one in contenders.items()}, rounds, warm_up=0)
    # the first profile contains the start of the profiler
    next(iter(contenders.values())).counts()
    return {
        optimizer: {"peak_bytes": peaks[optimizer], **one.row()}
        for optimizer, one in contenders.items()
    }


def network(
    name: str, device: torch.device, batch: int, side: int
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Build a network on the device, and the loss of a random batch."""
    model = build(name).to(device).to(memory_format=torch.channels_last)
    return model, loss_of(name, model, device, batch, side)


def table(rows: dict[str, dict[str, Any]], device: torch.device) -> str:
    """Return a line for each optimizer."""
    gpu = device.type == "cuda"
    counts = ("kernels", "waits", "copies") if gpu else ("ATen operators", "numbers read", "copies")
    heads = (
        "optimizer",
        "layers refreshed",
        *counts,
        "peak memory, GB",
        "step, ms",
        "optimizer.step, ms",
    )
    lines = [
        [
            optimizer,
            str(row["refreshed"]),
            str(row["kernels"]),
            str(sum(row["waits"].values())),
            str(sum(row["copies"].values())) if gpu else "–",
            "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.2f}",
            f"{statistics.median(row['step_ms']):.2f}",
            f"{statistics.median(row['optimizer_ms']):.2f}",
        ]
        for optimizer, row in rows.items()
    ]
    return markdown(heads, lines)
