"""gpu.py, in miniature on the CPU: every part runs, and what is wrong is told while the other parts
go on.
"""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from benchmarks import gpu, gpu_profile

OPTIMIZERS = [
    "THOR",
    "THOR, refresh",
    "ThorMuon",
    "ThorMuon, refresh",
    "AdamW, fused",
    "Muon, AdamW fused",
]


@pytest.fixture
def call(tmp_path, monkeypatch):
    """`python -m benchmarks gpu --device cpu --tiny`: what it wrote."""
    monkeypatch.setattr(
        sys,
        "argv",
        ["gpu.py", "--device", "cpu", "--tiny", "--out", str(tmp_path), "--build", str(tmp_path)],
    )

    def called(failing=()):
        if failing:
            with pytest.raises(SystemExit, match="failed:"):
                gpu.main()
        else:
            gpu.main()
        return json.loads((tmp_path / "gpu.json").read_text()), (tmp_path / "gpu.md").read_text()

    return called


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_a_miniature_of_everything(call):
    found, text = call()
    checks = found["Checks"]
    assert len(checks) == 14
    assert all(one["error"] < one["limit"] for one in checks)
    exact = {one["check"]: one["error"] for one in checks}
    assert exact["THOR, float64, against the reference"] < 1e-12
    times = found["Step times"]
    assert list(times) == ["squeezenet1_1", "bert-tiny"]
    assert times["squeezenet1_1"]["state_bytes"]["AdamW"] == pytest.approx(8, abs=0.01)
    assert "| THOR, float64, against the reference |" in text
    profiles = {name: rows for name, rows in found.items() if name.startswith("Profile")}
    assert [name.split()[2] for name in profiles] == [
        "squeezenet1_1,",
        "bert-tiny,",
        "gpt2-tiny,",
    ]
    for rows in profiles.values():
        assert_is_a_profile(rows)
    assert text.count("| optimizer | layers refreshed | ATen operators | numbers read |") == 3
    assert found["failures"] == []
    summary = text.partition("## In one table\n\n")[2]
    assert [line.split("|")[1].strip() for line in summary.splitlines()[2:5]] == [
        f"{name.removeprefix('Profile of ')}: ms a step" for name in profiles
    ]


def assert_is_a_profile(rows):
    """All optimizers were measured on a CPU; ours refresh where they should, which costs more."""
    assert list(rows) == OPTIMIZERS
    for row in rows.values():
        assert row["kernels"] > 0
        assert row["copies"] == {}
        assert row["peak_bytes"] is None
        assert len(row["step_ms"]) == len(row["optimizer_ms"]) == 1
        assert 0 < row["optimizer_ms"][0] < row["step_ms"][0]
    for name in ("THOR", "ThorMuon"):
        ordinary, refresh = rows[name], rows[f"{name}, refresh"]
        assert ordinary["refreshed"] == 0 < refresh["refreshed"]
        assert ordinary["kernels"] < refresh["kernels"]
        assert rows["AdamW, fused"]["kernels"] < ordinary["kernels"]


def test_what_is_wrong_is_told_and_the_other_parts_go_on(call, monkeypatch):
    monkeypatch.setattr(
        gpu, "errors", lambda device: iter([("good", 0.1, 0.2), ("bad", float("nan"), 0.2)])
    )
    monkeypatch.setattr(gpu, "times", lambda *words: 1 / 0)
    monkeypatch.setattr(gpu, "profiles", lambda report, **words: {"batch": words["subject"][1]})
    found, text = call(failing=("bad",))
    assert found["failures"] == [
        "bad: nan is not below 2e-01",
        "Step times: ZeroDivisionError: division by zero",
    ]
    assert found["Profile of gpt2-tiny, batch 2"] == {"batch": 2}
    assert "| gpt2-tiny, batch 2: ms a step |" in text.partition("## In one table")[2]
    assert "FAILED: bad" in text


@pytest.fixture(scope="module")
def study():
    return gpu_profile


def call_of_host(name, start=2.0, end=3.0):
    return FunctionEvent(0, name, 0, start, end, device_type=DeviceType.CPU)


def work_of_gpu(name, **words):
    # a device works after the host's call, perhaps when the step has already returned
    return FunctionEvent(0, name, 0, 20.0, 30.0, device_type=DeviceType.CUDA, **words)


@pytest.fixture
def counts(study):
    """What is counted in a profile of a step from 1 to 10 that has these events."""
    step = [
        call_of_host(study.SINGLE_PROCESS, 1.0, 10.0),
        work_of_gpu(study.SINGLE_PROCESS, is_user_annotation=True),
    ]
    return lambda *events, device="cuda": study.counted([*step, *events], torch.device(device))


NOTHING = {"kernels": 0, "waits": {}, "copies": {}}


@pytest.mark.parametrize(
    "name", ["cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"]
)
def test_a_wait_is_a_call_within_the_step(counts, name):
    once = call_of_host(name)
    assert counts(once, once) == {**NOTHING, "waits": {name: 2}}
    # the profiler's own, before and after the step
    assert counts(call_of_host(name, 0.0, 0.5), call_of_host(name, 10.0, 40.0)) == NOTHING


@pytest.mark.parametrize(
    "name",
    [
        "Memcpy DtoH (Device -> Pageable)",
        "Memcpy DtoH (Device -> Pinned)",
        "Memcpy HtoD (Pageable -> Device)",
    ],
)
def test_copies_to_the_host_and_from_pageable_memory_count(counts, name):
    assert counts(work_of_gpu(name)) == {**NOTHING, "copies": {name: 1}}


@pytest.mark.parametrize(
    "event",
    [
        call_of_host("cudaLaunchKernel"),
        call_of_host("cudaEventRecord"),
        call_of_host("cudaEventQuery"),
        call_of_host("cudaStreamWaitEvent"),
        call_of_host("cudaMemcpyAsync"),
        call_of_host("aten::_local_scalar_dense"),
        work_of_gpu("Memcpy HtoD (Pinned -> Device)"),
        work_of_gpu("Memcpy DtoD (Device -> Device)"),
        work_of_gpu("Memset (Device)"),
        work_of_gpu("Memset (Pageable)"),
        work_of_gpu("Optimizer.step#THOR.step", is_user_annotation=True),
    ],
    ids=lambda event: event.name,
)
def test_nothing_else_makes_the_host_wait_or_is_a_kernel(counts, event):
    assert counts(event) == NOTHING


def test_kernels_are_counted_whenever_the_device_gets_to_them(counts):
    names = ("void at::native::multi_tensor_apply_kernel<float>", "sm90_xmma_gemm_bf16")
    assert counts(*map(work_of_gpu, names), call_of_host("aten::mm"))["kernels"] == 2


def test_on_a_cpu_operators_and_numbers_that_are_read_are_counted(counts):
    events = [
        call_of_host("aten::item"),
        call_of_host("aten::_local_scalar_dense"),
        call_of_host("Optimizer.step#THOR.step"),
        call_of_host("aten::mm", 11.0, 12.0),
    ]
    wanted = {"kernels": 2, "waits": {"aten::_local_scalar_dense": 1}, "copies": {}}
    assert counts(*events, device="cpu") == wanted


def test_a_table_on_a_gpu_has_sums_medians_and_gigabytes(study):
    row = {
        "refreshed": 3,
        "kernels": 120,
        "waits": {"cudaStreamSynchronize": 2, "cudaEventSynchronize": 1},
        "copies": {"Memcpy DtoH (Device -> Pageable)": 2},
        "peak_bytes": 12_340_000_000,
        "step_ms": [9.0, 1.0, 2.0],
        "optimizer_ms": [0.25, 0.5, 4.0],
    }
    heads, _, line = study.table({"THOR": row}, torch.device("cuda")).splitlines()
    assert heads.startswith("| optimizer | layers refreshed | kernels | waits | copies |")
    assert line == "| THOR | 3 | 120 | 3 | 2 | 12.34 | 2.00 | 0.50 |"


def test_muon_trains_matrices_and_fused_adamw_the_rest(study):
    layers = (torch.nn.Embedding(5, 4), torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(4, 2))
    model = torch.nn.Sequential(*layers)
    groups = {group["algorithm"]: group for group in study.muon(model).param_groups}
    matrices = [model[1].weight, model[2].weight]
    assert [id(p) for p in groups["muon"]["params"]] == list(map(id, matrices))
    assert groups["adamw"]["fused"] is True
    assert len(groups["adamw"]["params"]) == 3


class Clock:
    """A GPU's time, which is known once the host has waited for it."""

    def __init__(self):
        self.now, self.waited = 0.0, False

    def passes(self, milliseconds):
        self.now, self.waited = self.now + milliseconds, False

    def synchronize(self):
        self.waited = True


def events_of(clock):
    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock.now

        def elapsed_time(self, end):
            assert clock.waited
            return end.at - self.at

    return Event


def test_on_a_gpu_events_tell_the_times_of_a_step(study, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(torch.cuda, "Event", events_of(clock))
    monkeypatch.setattr(torch.cuda, "synchronize", clock.synchronize)
    loss = SimpleNamespace(backward=lambda: clock.passes(5.0))
    optimizer = SimpleNamespace(
        step=lambda: clock.passes(3.0), zero_grad=lambda: clock.passes(100.0)
    )
    one = study.Contender(lambda model: optimizer, None, lambda: loss, torch.device("cuda"))
    one.step()
    assert (one.step_ms, one.optimizer_ms) == ([8.0], [3.0])


def test_peak_memory_is_that_of_one_step_without_what_others_hold(study, monkeypatch):
    done, one = [], study.Contender(lambda model: None, None, None, torch.device("cuda"))
    monkeypatch.setattr(one, "step", lambda: done.append("step"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: done.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5000 + len(done))
    assert one.peak_bytes(2000) == 3002
    assert done == ["reset", "step"]
