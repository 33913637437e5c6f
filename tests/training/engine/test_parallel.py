"""Under `torchrun` the same command trains data-parallel: what N processes do is what one does."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import rank_script
import signalled_script
from command_line import IMAGES, assert_same_runs, checkpoints, command, lines, newest, succeed
from image_tree import write_tree
from tiny import assert_same

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo"),
]
ROUNDING = {"rtol": 2e-4, "atol": 2e-5}  # float32, after tens of steps
# small images for a network without BatchNorm, whose averages are a process's own
PICTURES = (*IMAGES, "data.root=data", "data.transform.size=8", "data.transform.resize=9", "model=small-cnn")


@pytest.fixture
def pictures(tmp_path):
    """The small ImageNet without its broken images: 16 to train on."""
    write_tree(tmp_path / "data")
    for name in ("china/china_2", "flower/flower_2"):
        (tmp_path / f"data/train/{name}.JPEG").unlink()
    return tmp_path


def files(run):
    """What stands in a run folder; TensorBoard's names hold the time and the process."""
    return sorted(
        str(path.relative_to(run)) for path in run.rglob("*") if path.is_file() and "tfevents" not in path.name
    )


def events(run, optimizer):
    return len(list((run / optimizer / "tensorboard").iterdir()))


def assert_same_training(one, other, optimizer):
    """Losses, evaluations and weights of two run folders agree to rounding."""
    for kind, keys in (("step", ("loss",)), ("eval", ("loss", "averaged_loss"))):
        left, right = lines(one, optimizer, kind), lines(other, optimizer, kind)
        assert [line["step"] for line in left] == [line["step"] for line in right]
        for key in keys:
            np.testing.assert_allclose(
                [line[key] for line in left], [line[key] for line in right], **ROUNDING, err_msg=f"{kind} {key}"
            )
    steps = [[line["terms"] for line in lines(run, optimizer, "step")] for run in (one, other)]
    assert steps[0] == steps[1]
    accuracies = [[line.get("top1", 0) for line in lines(run, optimizer, "eval")] for run in (one, other)]
    np.testing.assert_allclose(*accuracies, atol=0.02)  # an image or two between two classes
    for name in ("model", "averaged"):
        left, right = (load_file(newest(run, optimizer) / f"{name}.safetensors") for run in (one, other))
        assert left.keys() == right.keys()
        for key in left:
            torch.testing.assert_close(left[key], right[key], **ROUNDING, msg=lambda text, key=key: f"{key}: {text}")


DIGITS = ("train", "digits", "optimizer=sgd,thor", "epochs=1", "batch_size=64", "ema_decay=0.9", "device=cpu")
DIGITS += ("accumulation=3", "eval_interval=11", "label_smoothing=0.1", "lr=0.01", "update_interval=6")


def test_digits_equal_one_process(tmp_path):
    """Fresh interpreters under the real `torchrun`; the other tests start ranks as it does, in warm processes."""
    one, many = tmp_path / "one", tmp_path / "many"
    succeed(tmp_path, *DIGITS, "--out", one)
    out = succeed(tmp_path, *DIGITS, "--out", many, ranks=2, cold=True)
    for optimizer in ("sgd", "thor"):
        assert_same_training(one, many, optimizer)
        assert events(one, optimizer) == events(many, optimizer) == 1
        assert out.count(f"{optimizer}: step 11 of 22") == 1  # one process talks
    assert files(one) == files(many)
    assert out.count("final accuracy, top-1") == 1


def test_processes_count_in_proportion_to_their_masked_tokens(tmp_path):
    """Examples have different numbers of masked tokens.

    The network has no dropout, which each process draws for itself. The gradients that reach the position embedding are
    sums over the examples of a process, so its factor depends on how many there are; it is left to SGD.
    """
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    no_dropout = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    config = {"model_type": "bert", "vocab_size": 300, **sizes, **no_dropout}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "texts").mkdir()
    for number in range(60):
        words = ["river", "music", "engine"] * (1 + number % 7)
        (tmp_path / f"texts/{number}.txt").write_text(f"Text number {number} of {' '.join(words)}.")
    settings = ("--out", "corpus", "--vocab-size", "100", "--seq-len", "32", "--held-out", "0.1")
    succeed(tmp_path, "prepare", "texts", *settings)
    text = ("data.name=corpus", "data.root=corpus", "data.text.length=32", "data.text.next_sentence=false")
    words = ("train", "bert-tiny", "model=config.json", *text, "batch_size=4", "steps=6", "device=cpu")
    words += ("optimizer=sgd,thor", "lr=0.01", "accumulation=2", "eval_interval=6", "ema_decay=0.9", "targets=[]")
    words += ("optimizers.thor.layers=-bert.embeddings.position_embeddings",)
    one, many = tmp_path / "one", tmp_path / "many"
    succeed(tmp_path, *words, "--out", one)
    succeed(tmp_path, *words, "--out", many, ranks=2)
    for optimizer in ("sgd", "thor"):
        assert_same_training(one, many, optimizer)


def test_the_first_process_measures_the_block_size_for_all(tmp_path):
    words = ("train", "digits", "optimizer=thor", "steps=3", "eval_interval=3", "batch_size=64", "device=cpu")
    out = succeed(tmp_path, *words, "split_dim=auto", "--out", "auto", ranks=2)
    number = re.search(r"split_dim=(\d+) was measured", " ".join(out.split()))[1]
    succeed(tmp_path, *words, f"split_dim={number}", "--out", "given", ranks=2)
    auto, given = (newest(tmp_path / run, "thor") for run in ("auto", "given"))
    assert_same(load_file(auto / "model.safetensors"), load_file(given / "model.safetensors"))


def test_images_equal_one_process(pictures):
    words = ["train", "digits", *PICTURES, "optimizer=momentum", "batch_size=4", "epochs=3", "lr=0.02", "ema_decay=0.9"]
    succeed(pictures, *words, "--out", "one")
    succeed(pictures, *words, "--out", "two", ranks=2)
    assert_same_training(pictures / "one", pictures / "two", "momentum")


def test_more_than_two_processes_go_on_bit_for_bit(tmp_path):
    """Of two numbers the sum does not depend on their order; DDP changes that of the gradients after its first step."""
    words = ("train", "digits", "optimizer=sgd", "steps=8", "batch_size=64", "device=cpu", "threads=1", "targets=[]")
    words += ("checkpoint_interval=4", "eval_interval=8", "keep_best=false", "keep_checkpoints=9")
    succeed(tmp_path, *words, "--out", tmp_path / "whole", ranks=4)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(newest(tmp_path / "again", "sgd"))
    succeed(tmp_path, "train", "digits", "--resume", "--out", tmp_path / "again", ranks=4)
    assert_same_runs(tmp_path / "whole", tmp_path / "again", "sgd")


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_divided_curvature_is_saved_whole_and_goes_on_bit_for_bit(tmp_path, way):
    words = ("train", "digits", "optimizer=thor", "steps=8", "update_interval=3", "batch_size=64", "device=cpu")
    words += ("threads=1", "targets=[]", "checkpoint_interval=4", "eval_interval=8", "keep_best=false")
    words += ("keep_checkpoints=9", f"parallel={way}")
    divided = "optimizers.thor.divide_curvature=true"
    succeed(tmp_path, *words, divided, "--out", tmp_path / "whole", ranks=2)
    succeed(tmp_path, *words, "--out", tmp_path / "everywhere", ranks=2)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(newest(tmp_path / "again", "thor"))
    said = succeed(tmp_path, "train", "digits", "--resume", "--out", tmp_path / "again", ranks=2)
    assert "continues from step 4" in said
    assert_same_runs(tmp_path / "whole", tmp_path / "again", "thor")
    assert lines(tmp_path / "whole", "thor", "step") == lines(tmp_path / "everywhere", "thor", "step")


def test_stopped_by_a_signal_it_goes_on_with_any_number_of_processes(pictures):
    words = ["train", "digits", *PICTURES, "optimizer=momentum", "batch_size=4", "epochs=7", "lr=0.005"]
    words += ["ema_decay=0.9", "checkpoint_interval=7", "eval_epochs=3"]
    run = pictures / "stopped"

    def stopped(step, ranks, count, *more):
        given = ("SIGTERM", step, ranks, *words, "--out", "stopped", *more)
        code, out, err = command(pictures, *given, ranks=count, script=signalled_script.__file__)
        assert code != 0
        said = [line for line in err.splitlines() if line.startswith("torch-thor")]
        assert len(said) == 1, err
        last = checkpoints(run, "momentum")[-1]
        assert step <= last <= step + 1
        assert f"stopped at step {last}, checkpoint written" in said[0]
        assert "DataLoader worker" not in err
        assert not list(run.glob("momentum/checkpoints/.writing-*"))
        return out

    stopped(9, "1", 2)
    assert "was saved by 2 processes, and this run has 4" in stopped(17, "0123", 4, "--resume")
    assert "was saved by 4 processes, and this run has 1" in succeed(pictures, *words, "--out", "stopped", "--resume")
    succeed(pictures, *words, "--out", "whole")
    assert_same_training(pictures / "whole", run, "momentum")


ELSEWHERE = """
import os, sys
from torch_thor.cli import main
if os.environ["RANK"] == "1":
    sys.argv = [word.replace("data.root=data", "data.root=elsewhere") for word in sys.argv]
main()
"""


def test_what_one_process_cannot_do_ends_all(pictures):
    (pictures / "main.py").write_text(ELSEWHERE)
    words = ["train", "digits", *PICTURES, "optimizer=sgd", "batch_size=4", "epochs=2", "--out", "run"]
    code, _, err = command(pictures, *words, ranks=2, script=pictures / "main.py")
    assert code != 0
    said = [line for line in err.splitlines() if line.startswith("torch-thor")]
    assert said == [
        "torch-thor, rank 1: data.root=elsewhere is not a folder: set it to the folder that contains train/ and val/"
    ]
    assert not (pictures / "run").exists()


def test_an_error_in_the_middle_on_one_process_ends_all(pictures):
    (pictures / "data/train/digit/digit_3.JPEG").write_bytes(b"broken")
    words = ["train", "digits", *PICTURES, "data.max_broken=0", "optimizer=sgd", "batch_size=4", "epochs=2"]
    code, _, err = command(pictures, *words, "checkpoint_interval=1", "--out", "run", ranks=2)
    assert code != 0
    assert 1 <= err.count("max_broken=0 allows") <= 2  # of the process itself, and of the other, which names it
    assert "digit_3.JPEG" in err
    shutil.copy(pictures / "data/train/digit/digit_4.JPEG", pictures / "data/train/digit/digit_3.JPEG")
    resume = ["--resume"] if checkpoints(pictures / "run", "sgd") else ["--overwrite"]
    succeed(pictures, *words, "checkpoint_interval=1", "--out", "run", *resume, ranks=2)  # whatever it had is whole


def test_a_batch_that_cannot_be_shared(tmp_path):
    code, _, err = command(tmp_path, "train", "digits", "batch_size=63", "device=cpu", ranks=2)
    assert code != 0
    assert [line for line in err.splitlines() if line.startswith("torch-thor")] == [
        "torch-thor: batch_size=63 cannot be shared evenly by 2 processes: it is the number of images per step on all "
        "of them together; choose a multiple of 2"
    ]
    assert not (tmp_path / "runs").exists()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of four processes found, in the order of their ranks."""
    folder = tmp_path_factory.mktemp("found")
    succeed(folder, folder, ranks=4, script=rank_script.__file__)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


def test_what_processes_tell_each_other(found):
    count = len(found)
    assert [one["shard"] for one in found] == [[rank, count, rank == 0, count] for rank in range(count)]
    for one in found:
        assert one["total"] == [pytest.approx(0.1 * sum(range(1, count + 1))), 2.0**53 * count]
        assert one["gathered"] == [{"rank": rank} for rank in range(count)]
    every = [one["refused"] for one in found]
    for rank, heard in enumerate(every):
        assert heard == [
            None,
            [rank != 1, "rank 1 cannot"],
            [rank != 0, "rank 0 cannot"],
            [rank != count - 1, f"rank {count - 1} cannot"],
        ]


def test_evaluation_equals_one_process(found):
    for index, (images, batch) in enumerate(rank_script.EVALUATIONS):
        scores = [one["evaluated"][index] for one in found]
        sizes = [score["sizes"] for score in scores]
        assert sum(map(sum, sizes)) == images
        assert len({len(one) for one in sizes}) == 1
        wanted = rank_script.evaluated(images, batch)
        for score in scores:
            assert (score["top1"], score["top5"]) == (wanted["top1"], wanted["top5"])
            assert score["loss"] == scores[0]["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
    empty = [0 in score["sizes"] for one in found for score in one["evaluated"]]
    assert any(empty)


@pytest.mark.parametrize("name", ["sgd", "sgd, parts", "thor", "thor, parts"])
def test_steps_equal_one_process_in_float64(found, name):
    wanted = rank_script.trained(thor=name.startswith("thor"))
    for one in found:
        assert one[name]["images"] == wanted["images"]
        np.testing.assert_allclose(one[name]["losses"], wanted["losses"], rtol=1e-6)  # summed up in float32
        for own, weight in zip(one[name]["weights"], wanted["weights"], strict=True):
            np.testing.assert_allclose(own, weight, rtol=1e-9, atol=1e-12)


def test_running_averages_are_the_saved_ones_when_evaluated(found):
    for one in found:
        assert one["norm"]["evaluations"] == found[0]["norm"]["evaluations"]
        assert one["norm"]["own"] == pytest.approx(found[0]["norm"]["evaluations"][-1], rel=1e-6)
