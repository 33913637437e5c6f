"""The study of a GPU: each part on the CPU with others' files as small as they can be."""

import json
import tarfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

import fetched
from benchmarks import gpu
from benchmarks.gpu import airbench, checks, nanogpt, profiles, step_times
from torch_thor.errors import UserError

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder, in which nothing was read."""
    monkeypatch.chdir(tmp_path)
    for read in (airbench.example, airbench.compiled, nanogpt.example):
        read.cache_clear()
    for read in (nanogpt.networks, nanogpt.compiled):
        read.cache_clear()


def test_jobs_need_a_gpu_and_the_files_of_others(here, monkeypatch):
    with pytest.raises(UserError, match="no CUDA device is visible to torch"):
        gpu.jobs({})
    monkeypatch.setattr(gpu, "DEVICE", torch.device("cuda"))
    counts = {gpu.CHECKS: 1, gpu.TIMES: 2, gpu.PROFILES: 3}
    assert Counter(job["part"] for job in gpu.jobs({})) == counts
    said = f"Not run: there is no {airbench.CODE}, {airbench.PACKED}."
    assert said in gpu.table({})
    fetched.write(fetched.NANOGPT | {airbench.CODE: "", airbench.PACKED: ""})
    counts |= {gpu.AIRBENCH: 21, gpu.NANOGPT: 6}
    assert Counter(job["part"] for job in gpu.jobs({})) == counts
    assert said not in gpu.table({})


@pytest.mark.filterwarnings("ignore")
def test_checks_fail_beyond_their_limits_only(monkeypatch):
    job = {"part": gpu.CHECKS, **checks.jobs()[0]}
    row = gpu.run(job)
    errors = {name: off for name, off, _ in row["checks"]}
    assert len(errors) == 14
    assert errors["THOR, float64, against the reference"] < 1e-12
    assert gpu.optimizers(job) == ["THOR", "ThorMuon"]
    bad = ("good", 0.1, 0.2), ("bad", float("nan"), 0.2)
    monkeypatch.setattr(checks, "errors", lambda: iter(bad))
    with pytest.raises(ArithmeticError, match=r"^above the limit: bad: nan$"):
        gpu.run(job)


# ---- trainings of others -------------------------------------------------------------------------


@pytest.mark.parametrize("name", [airbench.MUON, airbench.THOR_MUON, airbench.FILTERS])
def test_airbench_trains_with_the_optimizers_in_its_place(here, name):
    fetched.write({airbench.CODE: fetched.AIRBENCH})
    for split in ("train", "test"):
        for kind in ("cat", "ship"):
            file = Path("images") / split / kind / "0.jpg"
            file.parent.mkdir(parents=True)
            Image.new("RGB", (32, 32), "red" if kind == "cat" else "blue").save(file)
    airbench.DATA.mkdir(parents=True)
    with tarfile.open(airbench.PACKED, "w:xz") as packed:
        packed.add("images", arcname=".")
    job = {"optimizer": name, "epochs": 4, "seed": 0}
    row = airbench.run(job)
    assert row["data"] == "JPEG copies of CIFAR-10"
    assert len(row["val_acc"]) == len(row["train_acc"]) == 4
    assert row["tta_val_acc"] == row["val_acc"][-1]
    assert row["train_seconds"] == pytest.approx(0.7)
    module, model = airbench.example()
    assert module.own == fetched.AIRBENCH
    assert all(p.isfinite().all() for p in model.parameters())
    saved = torch.load(airbench.DATA / "test.pt")
    assert saved["images"].shape == (2, 32, 32, 3)
    assert sorted(saved["labels"].tolist()) == [3, 8]
    airbench.unpack()  # only once
    airbench.CODE.write_text("another version")
    airbench.example.cache_clear()
    with pytest.raises(ValueError, match=r"is not in .*py: take airbench94_muon.py of 2025"):
        airbench.example()


@pytest.mark.parametrize("name", ["AdamW", "ThorMuon"])
def test_nanogpt_trains_with_each_optimizer(here, name):
    fetched.write(fetched.NANOGPT)
    first, again = (nanogpt.run({"optimizer": name, "seed": 0}) for _ in range(2))
    steps, losses, seconds = zip(*first["curve"], strict=True)
    assert steps == (0, 5, 10, 12)
    assert losses[-1] < losses[0]
    assert losses == tuple(point[1] for point in again["curve"])
    assert seconds == tuple(sorted(seconds))
    assert seconds[0] == 0 < seconds[-1] < first["all_seconds"]


def test_the_rate_of_nanogpt_warms_up_and_falls_as_in_train_py():
    config = {"warmup_iters": 100, "lr_decay_iters": 5000, "learning_rate": 1e-3, "min_lr": 1e-4}
    shares = [nanogpt.share(step, config) for step in (0, 99, 100, 2550, 5000)]
    assert shares == pytest.approx([1 / 101, 100 / 101, 1.0, 0.55, 0.1])


# ---- profiles ------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """A pretended GPU: events at the time `clock.now`, and 5,000 bytes at the peak."""
    clock = SimpleNamespace(now=0.0)

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock.now

        def elapsed_time(self, end):
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2000)
    return clock


def test_events_tell_the_times_of_a_step_and_memory_is_without_what_others_hold(clock):
    def passes(milliseconds):
        clock.now += milliseconds

    loss = SimpleNamespace(backward=lambda: passes(5.0))
    optimizer = SimpleNamespace(step=lambda: passes(3.0), zero_grad=lambda: passes(100.0))
    contender = profiles.Contender(optimizer, lambda: loss)
    assert contender.peak_bytes(2000) == 3000
    assert (contender.step_ms, contender.optimizer_ms) == ([8.0], [3.0])


@pytest.mark.parametrize("network", ["squeezenet1_1", "bert-tiny", "gpt2-tiny"])
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_a_network_is_profiled_and_timed(clock, network):
    side = 32 if network == "squeezenet1_1" else 16
    job = {"model": network, "batch": 2, "side": side, "rounds": 2}
    row = {"job": job, **profiles.run(job)}
    assert list(row["optimizers"]) == list(profiles.OPTIMIZERS)
    for name, own in row["optimizers"].items():
        assert own["peak_bytes"] == 3000
        assert len(own["step_ms"]) == len(own["optimizer_ms"]) == 2
        assert (own["refreshed"] > 0) == name.endswith("refresh")
    assert profiles.table([row]).count("\n| ") == 7
    assert gpu.optimizers(job) == ["THOR", "ThorMuon"]
    times = {"job": job, **step_times.run(job)}
    assert times["state_bytes"]["AdamW"] == pytest.approx(8, abs=0.01)
    assert f"{network}, batch 2: a step of SGD takes" in step_times.table([times])


def on_the_host(name, start=2.0):
    return FunctionEvent(0, name, 0, start, start + 1.0, device_type=DeviceType.CPU)


def on_the_gpu(name, **words):
    # a device works after the host's call, perhaps when the step has already returned
    return FunctionEvent(0, name, 0, 20.0, 30.0, device_type=DeviceType.CUDA, **words)


def test_kernels_waits_and_copies_are_counted_in_the_step_only():
    step = FunctionEvent(0, profiles.STEP, 0, 1.0, 10.0, device_type=DeviceType.CPU)
    wait, other_wait = "cudaStreamSynchronize", "cudaEventSynchronize"
    to_host, from_host = "Memcpy DtoH (Device -> Pinned)", "Memcpy HtoD (Pageable -> Device)"
    counted = [on_the_gpu("multi_tensor_apply"), on_the_gpu("sm90_xmma_gemm_bf16")]
    counted += [on_the_host(wait), on_the_host(wait), on_the_host(other_wait)]
    counted += [on_the_gpu(to_host), on_the_gpu(from_host)]
    others = [on_the_gpu(profiles.STEP, is_user_annotation=True), on_the_gpu("Memset (Device)")]
    others += [on_the_gpu(f"Memcpy {way}") for way in ("HtoD (Pinned -> Device)", "DtoD (Device)")]
    others += [on_the_host(wait, 0.0), on_the_host(wait, 10.0)]
    others += [on_the_host("cudaLaunchKernel"), on_the_host("cudaMemcpyAsync")]
    assert profiles.counted([step, *counted, *others]) == {
        "kernels": 2, "waits": {wait: 2, other_wait: 1}, "copies": {to_host: 1, from_host: 1},
    }  # fmt: skip


# ---- what is shown -------------------------------------------------------------------------------


def test_the_recorded_tables_are_those_of_the_raw_data():
    """Each of an H200's tables; the raw data have them by parts and networks."""
    found = json.loads((RESULTS / "gpu-h200.json").read_text())
    rows = [
        {"job": {"part": gpu.CHECKS}, "checks": [tuple(row.values()) for row in found["Checks"]]}
    ]
    for part in (gpu.AIRBENCH, gpu.NANOGPT):
        rows += [{**row, "job": {"part": part, **row["job"]}} for row in found[part]]
    for name, row in found["Step times"].items():
        rows.append({**row, "job": {"part": gpu.TIMES, "model": name, "batch": row["batch"]}})
    for title in filter(lambda title: title.startswith("Profile of "), found):
        name, batch = title.removeprefix("Profile of ").split(", batch ")
        job = {"part": gpu.PROFILES, "model": name, "batch": batch}
        rows.append({"job": job, "optimizers": found[title]})
    text = (RESULTS / "gpu-h200.md").read_text()
    parts = gpu.table(dict(enumerate(rows))).split("\n\n")
    shown = [part for part in parts if not part.startswith(("#", "The machine", "In brackets"))]
    assert len(shown) == 11
    assert all(part in text for part in shown)
