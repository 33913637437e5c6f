"""Without a learning rate, a network that is trained already takes smaller steps."""

import copy
import math
import warnings

import pytest
import torch
from test_state import by_distributed_checkpoint, by_state_dict
from torch import nn
from torch.nn import functional as F

from tiny import assert_same, weights
from torch_thor import THOR, ThorMuon, param_groups
from torch_thor.optim.trained import ALL, LEARNED, NEW, REST, UNTOLD, dependence, dependence_of

DEPENDENT = 5  # standard errors


class Net(nn.Module):
    """An embedding, a convolution, a normalisation, matrices and a head."""

    def __init__(self, width=24):
        super().__init__()
        self.words = nn.Embedding(11, width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.norm = nn.LayerNorm(width)
        self.body = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
        self.head = nn.Linear(width, 5)

    def forward(self, words):
        x = torch.tanh(self.conv(self.words(words).mT).mT)
        return self.head(torch.tanh(self.body(self.norm(x)))).mean(1)


def teach_(model, but=("head",)):
    """Add a direction with a large singular value to most matrices, as training does."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1 and not name.startswith(but):
                rows, columns = p.flatten(1).shape
                left = torch.randn(rows, 1, generator=generator)
                right = torch.randn(1, columns, generator=generator)
                p += 0.3 * (left @ right).view_as(p)
    return model


def net(*, trained=True):
    torch.manual_seed(0)
    model = Net()
    return teach_(model) if trained else model


def data(count):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield (
            torch.randint(11, (8, 6), generator=generator),
            torch.randint(5, (8,), generator=generator),
        )


def train(model, optimizer, batches, after=lambda: None):
    for words, labels in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(words), labels).backward()
        optimizer.step()
        after()
    return weights(model)


def factors(optimizer, model):
    return {name: optimizer.state[p].get("lr_factor") for name, p in model.named_parameters()}


# ---- the statistic -------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(24, 24), (8, 200)])
@pytest.mark.parametrize(
    "draw",
    [
        torch.randn,
        lambda *s: torch.rand(*s) - 0.5,
        lambda *s: torch.randn(*s) * (torch.rand(*s) < 0.1),  # nn.init.sparse_
        lambda *s: torch.randn(*s) * torch.logspace(-2, 2, s[0])[:, None],
    ],
)
def test_the_dependence_of_independent_entries_is_standard_normal(draw, shape):
    torch.manual_seed(0)
    values = torch.stack([dependence(draw(*shape).double()) for _ in range(400)])
    values = values[~values.isnan()]
    assert len(values) > 350
    assert abs(values.mean()) < 5 / math.sqrt(400)
    assert 0.7 < values.std() < 1.2
    assert values.max() < 1.6 * DEPENDENT


def test_dependence_of_known_matrices():
    """Neither the size nor repeated rows count; a tensor of experts counts as its matrices."""
    torch.manual_seed(0)
    assert dependence(torch.randn(12, 1) @ torch.randn(1, 9)) > DEPENDENT
    assert dependence(nn.init.orthogonal_(torch.empty(24, 24))) < -DEPENDENT
    of_one_sign = torch.zeros(4, 5), torch.eye(6), torch.rand(9, 9)
    for matrix in (*of_one_sign, torch.randn(1, 7), torch.randn(7, 1)):
        assert dependence(matrix.double()).isnan()
    matrix = torch.randn(9, 12).double()
    repeated = matrix.repeat(2, 1), matrix.repeat(1, 3), torch.cat([matrix, -matrix])
    for other in (1e20 * matrix, *repeated):
        assert torch.isclose(dependence(other), dependence(matrix))
    experts = torch.randn(4, 16, 12) / 4
    assert abs(dependence_of(nn.Parameter(experts))) < DEPENDENT
    direction = torch.einsum("ei,ej->eij", torch.randn(4, 16), torch.randn(4, 12))
    assert dependence_of(nn.Parameter(experts + direction)) > DEPENDENT


@pytest.mark.parametrize("name", ["resnet18", "swin_t"])
def test_networks_of_torchvision_are_untrained(name):
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.get_model(name)
    found = [dependence_of(p) for p in model.parameters() if p.dim() > 1]
    values = [float(v) for v in found if not v.isnan()]
    assert len(values) > 10
    assert max(values) < DEPENDENT
    assert min(values) > -DEPENDENT


# ---- an untrained network ------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "rate"), [(THOR, 0.05), (ThorMuon, 0.08)])
def test_from_scratch_the_steps_are_those_of_an_explicit_rate(make, rate):
    found = []
    for options in ({}, {"lr": rate}, {"lr": None}):
        model = net(trained=False)
        found.append(train(model, make(model, **options), data(4)))
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])


@pytest.mark.parametrize(
    "init",
    [
        nn.init.orthogonal_,
        nn.init.zeros_,
        lambda w: nn.init.trunc_normal_(w, std=0.02),
        lambda w: nn.init.dirac_(w) if w.dim() == 3 else nn.init.eye_(w),
        lambda w: w.add_(1.0) if w.shape[1:] == (24, 3) else w,  # only the convolution looks so
    ],
)
def test_initial_weights_count_as_untrained(init):
    model = net(trained=False)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                init(p)
    optimizer = ThorMuon(model)
    train(model, optimizer, data(1))
    assert set(factors(optimizer, model).values()) == {NEW}


def test_one_trained_matrix_of_five_makes_no_trained_network():
    model = teach_(net(trained=False), but=("head", "conv", "body.1", "body.2"))
    optimizer = ThorMuon(model)
    train(model, optimizer, data(1))
    assert set(factors(optimizer, model).values()) == {NEW}


# ---- a trained network ---------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"weight_decay": 0.1}, {"split_dim": None}])
def test_a_trained_network_takes_the_steps_of_groups_with_these_rates(options):
    model = net()
    nn.init.zeros_(model.body[2].weight)
    twin = copy.deepcopy(model)
    optimizer = ThorMuon(model, **options)
    expected = {
        name: REST if p.dim() == 1 or name.startswith("words") else LEARNED
        for name, p in twin.named_parameters()
    }
    expected |= {"body.2.weight": UNTOLD, "head.weight": NEW}
    groups = [{"params": [p], "lr": 0.08 * expected[name]} for name, p in twin.named_parameters()]
    other = ThorMuon(groups, lr=0.08, model=twin, **options)
    runs = []
    for each, its_optimizer in ((model, optimizer), (twin, other)):
        schedule = torch.optim.lr_scheduler.LambdaLR(its_optimizer, lambda step: 1 / (1 + step))
        runs.append(train(each, its_optimizer, data(5), after=schedule.step))
    assert_same(*runs)
    assert factors(optimizer, model) == expected
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.08 / 6)


def test_thor_multiplies_the_rate_and_the_bound_of_all_but_a_new_head():
    model = net()
    optimizer = THOR(model, update_interval=2)
    twin = copy.deepcopy(model)
    expected = {name: NEW if name == "head.weight" else ALL for name, _ in model.named_parameters()}
    groups = [
        {"params": [p], "lr": 0.05 * expected[name], "max_update_ratio": 0.01 * expected[name]}
        for name, p in twin.named_parameters()
    ]
    other = THOR(groups, lr=0.05, model=twin, update_interval=2)
    before = weights(model)
    said = r"multiplied by 1 for 1 matrices .*, 0\.05 for 12 other parameters\. Give lr="
    with pytest.warns(RuntimeWarning, match=said):
        found = train(model, optimizer, data(5))
    wanted = train(twin, other, data(5))
    for name, value in wanted.items():
        assert not torch.equal(value, before[name])
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)
    assert factors(optimizer, model) == expected


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*single process")
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("carry", [by_state_dict, by_distributed_checkpoint])
def test_a_resumed_run_keeps_its_factors_whatever_its_weights_look_like_now(carry, trained):
    model = net(trained=trained)
    optimizer = ThorMuon(model)
    train(model, optimizer, data(2))
    if trained:
        model.body[0].weight.data.copy_(torch.randn(24, 24))
    else:
        teach_(model)
    again = net(trained=not trained)
    resumed = ThorMuon(again)
    carry((model, optimizer), (again, resumed))
    assert_same(train(model, optimizer, data(3)), train(again, resumed, data(3)))
    assert factors(resumed, again) == factors(optimizer, model)
    assert factors(resumed, again)["body.0.weight"] == (LEARNED if trained else NEW)


# ---- which parameters have a factor --------------------------------------------------------------


def test_a_given_rate_is_taken_as_it_is():
    """The rate of an optimizer or of a group; groups of `param_groups` have none."""
    for lr in (0.08, torch.tensor(0.08)):
        model = net()
        optimizer = ThorMuon(model, lr=lr)
        train(model, optimizer, data(1))
        assert set(factors(optimizer, model).values()) == {None}
    model = net()
    rest = [p for name, p in model.named_parameters() if not name.startswith("body.0")]
    first = {"params": model.body[0].parameters(), "lr": 0.05}
    for groups, factor in (([first, {"params": rest}], None), (param_groups(model), LEARNED)):
        optimizer = ThorMuon(groups, model=model)
        train(model, optimizer, data(1))
        assert factors(optimizer, model)["body.0.weight"] == factor
        assert factors(optimizer, model)["body.1.weight"] == LEARNED


@pytest.mark.parametrize("trained", [True, False])
def test_parameters_that_are_added_later_belong_to_the_network_of_the_first_step(trained):
    model = net(trained=trained)
    model.head.requires_grad_(False)
    optimizer = ThorMuon([p for p in model.parameters() if p.requires_grad], model=model)
    train(model, optimizer, data(1))
    teach_(model)
    model.head.requires_grad_(True)
    optimizer.add_param_group({"params": model.head.parameters()})
    train(model, optimizer, data(1))
    assert factors(optimizer, model)["head.weight"] == NEW
    assert factors(optimizer, model)["head.bias"] == (REST if trained else NEW)


class Integers(nn.Module):
    """A frozen layer whose weight is kept as integers in a buffer, as GPTQ and AWQ do."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("integers", torch.randint(-127, 128, (size, size), dtype=torch.int8))

    def forward(self, x):
        return F.linear(x, self.integers / 127)


def frozen(layer):
    return layer.requires_grad_(False)


@pytest.mark.parametrize(
    ("build", "is_trained"),
    [
        (lambda: [nn.Linear(8, 8), Integers(8)], False),  # as many numbers
        (lambda: [nn.Linear(8, 8), Integers(8), Integers(8)], True),
        (lambda: [nn.Linear(8, 8), frozen(nn.Linear(8, 8)), frozen(nn.Linear(8, 8))], True),
        (lambda: [frozen(nn.Embedding(100, 8)), nn.Linear(8, 8), nn.Linear(8, 2)], False),
    ],
)
def test_a_network_is_trained_if_most_of_its_numbers_are_frozen_or_quantised(build, is_trained):
    torch.manual_seed(0)
    model = nn.Sequential(*build())
    optimizer = ThorMuon(model)
    x = torch.arange(6) if isinstance(model[0], nn.Embedding) else torch.randn(4, 8)
    model(x).square().mean().backward()
    optimizer.step()
    assert {group["trained"] for group in optimizer.param_groups} == {is_trained}
    other = ThorMuon(model)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.param_groups[0]["trained"] is is_trained


def test_a_warning_and_the_print_tell_the_factors_and_their_reasons():
    """The weights may be loaded after the optimizer was made."""
    model = net(trained=False)
    optimizer = ThorMuon(model)
    model.load_state_dict(net().state_dict())
    nn.init.zeros_(model.body[2].weight)
    assert str(optimizer).endswith(
        "lr=None: the first step tells from the weights whether they are trained already"
    )
    with pytest.warns(RuntimeWarning, match=r"trained already.*0\.125 for.*Give lr="):
        train(model, optimizer, data(1))
    assert str(optimizer).endswith(
        f"lr=None: the network is trained already, so lr is multiplied by {LEARNED:g} for 3 "
        "matrices whose entries are dependent, as training leaves them, "
        f"{UNTOLD:g} for 1 matrices that do not tell (of zeros, of one sign, or with equal rows or "
        "columns), 1 for 1 matrices whose entries are independent, as initializers leave them, "
        f"{REST:g} for 8 other parameters"
    )
    fresh = net(trained=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, data(3))
        train(fresh, ThorMuon(fresh), data(2))
    assert "lr=None" not in str(ThorMuon(fresh, lr=0.08))
