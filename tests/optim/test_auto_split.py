"""split_dim="auto": the first step decides, as if the number had been given; the next training finds it."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn import functional as F

from comparing import having
from fake_times import fake_times
from torch_thor import THOR, choose_split_dim
from torch_thor.curvature import parameter_view
from torch_thor.curvature.statistics import Statistics
from torch_thor.split import choice


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_THOR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def measured():
    """Times that make the curves cross between 16 and 32, whatever runs beside; and how often they were asked for."""
    asked = []

    def seconds(sizes, split_dims, **_):
        asked.append(tuple(split_dims))
        return tuple(0.1 if size == 1 else 0.2 if size <= 16 else 100.0 for size in split_dims)

    with fake_times(seconds):
        yield asked


def network():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(6, 8, 3, groups=2),
        nn.Tanh(),
        nn.Conv2d(8, 40, 2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(40 * 4, 5),
    ).double()


def batches(count):
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        images = torch.randn(12, 6, 5, 5, generator=generator, dtype=torch.float64)
        yield images, torch.randint(0, 5, (12,), generator=generator)


def train(model, optimizer, count, micro_batches=1):
    for images, labels in batches(count):
        for part in range(micro_batches):
            loss = F.cross_entropy(model(images[part::micro_batches]), labels[part::micro_batches])
            (loss / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def weights_with(split_dim, count=5, micro_batches=1, **options):
    model = network()
    optimizer = THOR(model, split_dim=split_dim, update_interval=2, trace_thresholds=(0.0, 0.0), **options)
    return train(model, optimizer, count, micro_batches), optimizer


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_trains_as_if_the_number_had_been_given(measured, micro_batches):
    auto, optimizer = weights_with("auto", micro_batches=micro_batches)
    chosen = optimizer.param_groups[0]["split_dim"]
    assert chosen == 16
    expected, with_number = weights_with(chosen, micro_batches=micro_batches)
    torch.testing.assert_close(auto, expected, rtol=1e-9, atol=1e-12)
    another, _ = weights_with(32, micro_batches=micro_batches)
    assert not torch.allclose(auto, another, rtol=1e-4)
    for left, right in zip(optimizer.state.values(), with_number.state.values(), strict=True):
        assert {k: v.shape for k, v in left.items() if torch.is_tensor(v)} == {
            k: v.shape for k, v in right.items() if torch.is_tensor(v)
        }


def test_is_the_choice_of_choose_split_dim(measured):
    model = network()
    choice = choose_split_dim(model, next(batches(1)))
    _, optimizer = weights_with("auto", count=1)
    assert optimizer.param_groups[0]["split_dim"] == choice.split_dim == 16
    assert measured[0] == measured[1] == choice.candidates == (1, 16, 32, 64, 128, 160)


def test_the_first_training_measures_once_and_the_next_one_not(measured):
    first, _ = weights_with("auto")
    assert len(measured) == 1
    optimizer = THOR(network(), split_dim="auto")
    assert optimizer.param_groups[0]["split_dim"] == 16
    second, _ = weights_with("auto")
    assert len(measured) == 1
    torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-12)
    wider = nn.Sequential(nn.Linear(70, 5)).double()
    assert THOR(wider, split_dim="auto").param_groups[0]["split_dim"] == "auto"


def test_a_choice_that_appears_before_the_first_step_is_taken(measured):
    waiting_model = network()
    waiting = THOR(waiting_model, split_dim="auto", update_interval=2, trace_thresholds=(0.0, 0.0))
    expected, _ = weights_with("auto")
    assert waiting.param_groups[0]["split_dim"] == "auto"
    torch.testing.assert_close(train(waiting_model, waiting, 5), expected, rtol=1e-9, atol=1e-12)
    assert len(measured) == 1


def test_only_the_groups_that_ask_for_it(measured):
    model = network()
    groups = [
        {"params": model[0].parameters(), "split_dim": 3},
        {"params": model[2].parameters()},
        {"params": model[5].parameters(), "split_dim": None},
    ]
    optimizer = THOR(groups, model=model, split_dim="auto")
    train(model, optimizer, 1)
    assert [group["split_dim"] for group in optimizer.param_groups] == [3, 32, None]
    assert measured == [(1, 16, 32, 40)]
    assert optimizer.state[model[2].weight]["G"].shape == (40, 32)
    assert optimizer.state[model[5].weight]["A"].shape == (1, 160, 160)


def test_checkpoints_carry_the_number(measured, folder):
    model = network()
    optimizer = THOR(model, split_dim="auto", update_interval=2)
    train(model, optimizer, 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = train(model, optimizer, 3)
    for file in folder.iterdir():
        file.unlink()  # another machine
    resumed_model = network()
    resumed = THOR(resumed_model, split_dim="auto", update_interval=2)
    assert resumed.param_groups[0]["split_dim"] == "auto"
    resumed_model.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert resumed.param_groups[0]["split_dim"] == 16
    assert torch.equal(train(resumed_model, resumed, 3), expected)
    assert len(measured) == 1


def test_a_refused_step_decides_nothing(measured):
    model = network()
    optimizer = having(THOR(model, split_dim="auto"), nonfinite="skip")
    images, labels = next(batches(1))
    (F.cross_entropy(model(images), labels) * torch.inf).backward()
    optimizer.step()
    assert optimizer.param_groups[0]["split_dim"] == "auto"
    optimizer.zero_grad()
    train(model, optimizer, 1)
    assert optimizer.param_groups[0]["split_dim"] == 16


def test_without_statistics_the_papers_number_and_a_warning(measured):
    model = network()
    optimizer = THOR(model, split_dim="auto", update_interval=2, trace_thresholds=(0.0, 0.0))
    with pytest.warns(RuntimeWarning, match="'auto' takes 128.*brought no statistics"):
        get_optimizer_state_dict(model, optimizer)  # asks for the state by a step with gradients of zero
    assert optimizer.param_groups[0]["split_dim"] == 128
    assert measured == []
    expected = weights_with(128, count=3)[0]
    torch.testing.assert_close(train(model, optimizer, 3), expected, rtol=1e-9, atol=1e-12)


def test_no_memory_for_the_largest_candidate_is_no_error():
    def exhausted(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    with fake_times(exhausted), pytest.warns(RuntimeWarning, match="'auto' takes 128.*out of memory"):
        auto, optimizer = weights_with("auto")
    assert optimizer.param_groups[0]["split_dim"] == 128
    torch.testing.assert_close(auto, weights_with(128)[0], rtol=1e-9, atol=1e-12)


def test_a_cache_that_cannot_be_written_is_a_warning(measured, folder):
    folder.write_text("a file in the place of the folder")
    with pytest.warns(RuntimeWarning, match="chose 16, and could not keep it.*TORCH_THOR_CACHE"):
        _, optimizer = weights_with("auto")
    assert optimizer.param_groups[0]["split_dim"] == 16


def test_a_later_group_is_decided_when_it_comes(measured):
    model = network()
    optimizer = THOR(model[0].parameters(), model=model, split_dim=3)
    train(model, optimizer, 1)
    optimizer.add_param_group({"params": model[2].parameters(), "split_dim": "auto"})
    train(model, optimizer, 1)
    assert [group["split_dim"] for group in optimizer.param_groups] == [3, 32]


def test_a_vocabulary_is_never_whole(monkeypatch, measured):
    # 8192 rows are the largest block; here 8, so that the test stays small
    monkeypatch.setattr(parameter_view, "LARGEST", 8)
    monkeypatch.setattr(choice, "LARGEST", 8)
    widest = []
    really = Statistics.gather

    def gather(statistics, *rows, **options):
        really(statistics, *rows, **options)
        widest.append(max(part.shape[-1] for sums in statistics.gathered() for part in sums.parts()))

    monkeypatch.setattr(Statistics, "gather", gather)
    model = nn.Linear(21, 4)
    optimizer = THOR(model, split_dim="auto")
    F.cross_entropy(model(torch.randn(9, 21)), torch.zeros(9, dtype=torch.long)).backward()
    optimizer.step()
    assert widest == [8]
    assert measured == [(1, 8)]
    assert optimizer.param_groups[0]["split_dim"] in {1, 8}


@pytest.mark.parametrize("value", ["Auto", "", 0, 1.5, True, ["auto"]])
def test_other_words_are_refused(value):
    with pytest.raises(ValueError, match='a whole number ≥ 1, None for unsplit factors, or "auto"'):
        THOR(network(), split_dim=value)
