"""Two agents of `torchrun` on one machine, as on two machines."""

import pytest
from torch import distributed as dist
from torch.distributed import run as torchrun

from command_line import assert_same_runs, finish, start, succeed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this torch has no gloo"),
]
DIGITS = ("train", "digits", "optimizer=thor", "steps=6", "batch_size=64", "device=cpu", "threads=1", "targets=[]")


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_two_agents_train_as_two_processes_of_one(tmp_path, way):
    one, two = tmp_path / "one", tmp_path / "two"
    words = (*DIGITS, f"parallel={way}", "--out")
    succeed(tmp_path, *words, one, ranks=2)
    # the agents find each other through a file: a port that is free now may not be free when they start
    meeting = ("--rdzv-backend=c10d", "--rdzv-conf=store_type=file", f"--rdzv-endpoint={tmp_path / 'meeting'}")
    agent = ("--nnodes=2", "--nproc-per-node=1", "--local-addr=localhost", *meeting, "--rdzv-id=trial")
    command = (*agent, "-m", "torch_thor", *words, two)
    agents = [start(tmp_path, *command, script=torchrun.__file__, cold=True) for _ in range(2)]
    for process in agents:
        code, out, err = finish(process)
        assert code == 0, f"{out}\n{err}"
    if way == "ddp":
        assert_same_runs(one, two, "thor")
    else:
        parts = sorted(path.relative_to(one) for path in one.rglob("*.distcp"))
        assert len(parts) >= 2
        for part in parts:
            assert (one / part).read_bytes() == (two / part).read_bytes(), part
