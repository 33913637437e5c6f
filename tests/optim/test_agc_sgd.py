"""AGCSGD: SGD on the gradients of the loops, to the bit where nothing is clipped."""

import copy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from reference.agc import clipped, output_of_each_number, rows_of_dim_0
from tiny import assert_same, batches, cross_entropy, mlp, train, weights
from torch_thor import AGCSGD

INF = float("inf")
SETTINGS = {
    "plain": {},
    "dampening": {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
    "maximize": {"momentum": 0.9, "maximize": True, "weight_decay": 0.1},
}
FIRST = {"momentum": 0.9, "dampening": 0.5, "clip_factor": INF, "dampen_first": True}
# W = (3, 4), lr = 0.5, μ = 0.9, τ = 0.5: options, gradients, W after each step
BY_HAND = {
    # v starts with 0 + (1, 0), and goes on with (0.9, 0) + (0, 2)
    "first": (FIRST, (2, 0), (0, 4), (2.5, 4), (2.05, 3)),
    # the same v; W less half of (2, 0) + 0.9 (1, 0), then less half of (0, 4) + 0.9 (0.9, 2)
    "nesterov": (FIRST | {"nesterov": True}, (2, 0), (0, 4), (1.55, 4), (1.145, 1.1)),
}  # fmt: skip


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("name", BY_HAND)
def test_two_steps_by_hand(name, foreach):
    """The second parameter gets its first gradient in the second step, and starts then."""
    options, *steps = BY_HAND[name]
    p, late = (nn.Parameter(torch.tensor([[3.0, 4.0]], dtype=torch.float64)) for _ in range(2))
    optimizer = AGCSGD([p, late], lr=0.5, exclude=(), foreach=foreach, **options)
    for step in range(2):
        p.grad = torch.tensor([steps[step]], dtype=torch.float64)
        late.grad = torch.tensor([steps[0]], dtype=torch.float64) if step else None
        optimizer.step()
        assert p.tolist() == [pytest.approx(steps[2 + step], rel=1e-13)]
    assert late.tolist() == [pytest.approx(steps[2], rel=1e-13)]


def network(dtype=torch.float32):
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv1d(1, 4, 2), nn.PReLU(), nn.ConvTranspose1d(4, 6, 2, groups=2), nn.Flatten(),
        nn.LayerNorm(30),
        nn.Linear(30, 6), Conv1D(5, 6), nn.Linear(5, 3),
    ).to(dtype)  # fmt: skip
    model[0].weight = nn.Parameter(model[0].weight.mT.contiguous().mT)
    return model


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize(
    ("clip_factor", "dtype"),
    [(INF, torch.float64), (INF, torch.float32), (INF, torch.bfloat16), (0.03, torch.float64)],
)
def test_it_is_sgd_on_the_gradients_of_the_loops(clip_factor, dtype, foreach, name):
    """Along the outputs of each kind of layer; strides are SGD's too."""
    model, twin = network(dtype), network(dtype)
    sizes = {"0": (1, 1, 5), "2": (1, 4, 4), "5": (1, 30), "6": (1, 6)}
    outputs = {
        f"{n}.weight": output_of_each_number(network()[int(n)], size) for n, size in sizes.items()
    }
    optimizer = AGCSGD(model, lr=0.05, clip_factor=clip_factor, foreach=foreach, **SETTINGS[name])
    other = torch.optim.SGD(twin.parameters(), lr=0.05, foreach=foreach, **SETTINGS[name])
    assert optimizer.excluded == ("7.weight", "7.bias")
    shares = []
    for x, labels in batches(5, dtype=dtype):
        train(model, optimizer, [(x[:, None], labels)])
        cross_entropy(labels)(twin(x[:, None])).backward()
        count, units = 0, 0
        for key, p in twin.named_parameters() if clip_factor < INF else ():
            if not key.startswith("7."):
                where = outputs.get(key, rows_of_dim_0(p.shape))
                arrays = p.detach().numpy(), p.grad.numpy()
                numbers, more = clipped(*arrays, where, clip_factor, 1e-3)
                p.grad = torch.tensor(numbers)
                count, units = count + more, units + int(where.max()) + 1
        other.step()
        other.zero_grad()
        if clip_factor < INF:
            found = optimizer.clip_statistics
            assert (int(found.clipped), found.units) == (count, units)
            shares.append(count / units)
        exact = {"rtol": 0, "atol": 0} if clip_factor == INF else {"rtol": 1e-9, "atol": 1e-12}
        torch.testing.assert_close(weights(model), weights(twin), **exact)
    assert all(0.1 < share < 0.95 for share in shares)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(
            optimizer.state[p], other.state[q], check_stride=clip_factor == INF, **exact
        )


def test_groups_have_clip_factors_and_units_of_their_own():
    model = mlp()
    groups = [
        {"params": model[0].parameters(), "clip_factor": INF},
        {"params": model[2].parameters()},
    ]
    optimizer = AGCSGD(groups, model=model, lr=0.1, clip_factor=1e-9)
    assert optimizer.clip_statistics is None
    model.append(nn.ConvTranspose1d(3, 2, 1, bias=False))
    optimizer.add_param_group({"params": model[5].parameters()})
    model[5].weight.grad = torch.ones_like(model[5].weight)
    train(model[:5], optimizer, batches(1))
    found = optimizer.clip_statistics
    assert (int(found.clipped), found.units) == (7 + 2, 8 + 7 + 2)


def test_a_checkpoint_of_sgd_goes_on():
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.8)
    train(model, sgd, batches(2))
    twin = copy.deepcopy(model)
    optimizer = AGCSGD(twin, lr=0.1, clip_factor=INF, eps=0.5)
    optimizer.load_state_dict(sgd.state_dict())
    expected = {"lr": 0.3, "momentum": 0.8, "clip_factor": INF, "eps": 0.5}
    assert expected.items() <= optimizer.param_groups[0].items()
    train(model, sgd, batches(4)[2:])
    train(twin, optimizer, batches(4)[2:])
    assert_same(weights(model), weights(twin))


def test_it_finds_the_last_linear_or_asks_for_it_and_says_what_is_left_alone():
    head = mlp()
    last = "not clipped is the last nn.Linear, '4': 4.weight, 4.bias"
    for optimizer, said in (
        (AGCSGD(head), last),
        (AGCSGD(head[4].named_parameters(prefix="4"), model=head), last),
        (
            AGCSGD(head[0].parameters(), model=head),
            "not clipped is the last nn.Linear, '4': its parameters are in no group",
        ),
        (AGCSGD(nn.Sequential(nn.Conv2d(1, 2, 1))), "all are clipped: Sequential has no nn.Linear"),
        (AGCSGD(head, exclude="0.*"), "not clipped, as exclude= says: 0.weight, 0.bias"),
        (AGCSGD(head.parameters(), exclude=()), "not clipped, as exclude= says: none"),
    ):
        assert repr(optimizer).splitlines()[-1].startswith(said)
        assert all(name in said for name in optimizer.excluded)
        assert "clip_factor: 0.01" in repr(optimizer)
    with pytest.raises(TypeError, match=r"must know the model.*model=model.*exclude=\(\)"):
        AGCSGD(head.parameters())
