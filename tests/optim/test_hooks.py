"""While THOR waits for statistics the model carries nothing of it, and the hooks of others change no statistics."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.swa_utils import AveragedModel

from tiny import assert_same, batches, cross_entropy, listened_to, train, weights
from torch_thor import THOR

STREAM = batches(4, features=4)


class Model(nn.Module):
    """A linear layer, an attention and a head."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        h = torch.tanh(self.first(x))[:, None]
        return self.last(self.attention(h, h, h, need_weights=False)[0][:, 0])


def build():
    return Model().double()


def saved_and_loaded(model):
    """Loads with `weights_only=True`: the user's own modules are declared safe, nothing else has to be."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    kinds = {type(m) for m in model.modules()} | {nn.modules.linear.NonDynamicallyQuantizableLinear}
    with torch.serialization.safe_globals([*kinds, set]):
        return torch.load(file, weights_only=True)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "saved": saved_and_loaded,
    "average": lambda model: AveragedModel(model).module,
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_made_while_thor_waits_is_the_bare_model(how):
    model = build()
    bare = copy.deepcopy(model)
    optimizer = THOR(model)
    assert listened_to(model) == {"first", "attention", "last"}
    twin = COPIES[how](model)
    assert not listened_to(twin)
    for one in (model, twin):
        for module, plain in zip(one.modules(), bare.modules(), strict=True):
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
            assert vars(module).keys() == vars(plain).keys()
    twin(STREAM[0][0]).sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        ours.grad = theirs.grad
    with pytest.raises(RuntimeError, match="no statistics"):  # the pass of a copy is nobody's statistics
        optimizer.step()


def test_a_model_is_scripted_while_thor_waits():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    optimizer = THOR(model)
    scripted = torch.jit.script(model)
    traced = torch.jit.trace(model, STREAM[0][0])
    with torch.no_grad():
        for one in (scripted, traced):
            torch.testing.assert_close(one(STREAM[0][0]), model(STREAM[0][0]))
    train(model, optimizer, STREAM[:1])
    assert all(curvature.refreshes == 1 for curvature in optimizer.curvature.values())
    assert optimizer.curvature["0"].rows_per_term == 1


@pytest.mark.parametrize("where", ["before THOR", "after THOR", "global, before", "global, after"])
def test_an_output_that_a_hook_replaces(where):
    """`g` is the gradient of what the layer itself has computed: three times that of what the hook made of it."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    plain = nn.Sequential(model[0], nn.Tanh(), nn.Linear(5, 3).double())
    plain[2].load_state_dict({name: 3 * value for name, value in model[2].state_dict().items()})

    def replace(module, args, output):
        return 3 * output if module is model[2] else None

    x, labels = STREAM[0]

    def register():
        return register_module_forward_hook(replace) if "global" in where else model[2].register_forward_hook(replace)

    handle = register() if "before" in where else None
    optimizer = THOR(model, lr=0.0)
    handle = handle or register()
    cross_entropy(labels)(model(x)).backward()
    handle.remove()
    optimizer.step()
    hidden = torch.tanh(model[0](x))
    scores = (3 * model[2](hidden)).detach()
    g = 3 * (scores.softmax(-1) - nn.functional.one_hot(labels, 3))  # of one loss term, by hand
    A, G = optimizer.curvature["2"].factors()
    torch.testing.assert_close(G, g.mT @ g / len(x))
    torch.testing.assert_close(A, hidden.mT @ hidden / len(x))


def test_refreshes_leave_no_finalizers_behind():
    model = build()
    optimizer = THOR(model, update_interval=1, trace_thresholds=(0.0, 0.0))
    train(model, optimizer, STREAM[:1])
    gc.collect()
    before = len(weakref.finalize._registry)
    references = weakref.getweakrefcount(optimizer._capture)
    for _ in range(5):
        train(model, optimizer, STREAM[1:3])
        optimizer.add_param_group({"params": []})
    assert len(weakref.finalize._registry) == before
    assert weakref.getweakrefcount(optimizer._capture) <= references


def test_two_optimizers_wait_for_one_model():
    """Each hears the calls, and the one that is done hears no more."""
    model, twin = (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double() for _ in range(2))
    twin.load_state_dict(model.state_dict())
    one, other, alone = THOR(model, lr=0.0), THOR(model, lr=0.0), THOR(twin, lr=0.0)
    x, labels = STREAM[0]
    cross_entropy(labels)(model(x)).backward()
    cross_entropy(labels)(twin(x)).backward()
    for optimizer in (one, other, alone):
        optimizer.step()
    assert not listened_to(model)
    for optimizer in (one, other):
        for name, curvature in optimizer.curvature.items():
            assert_same(dict(enumerate(curvature.factors())), dict(enumerate(alone.curvature[name].factors())))
    assert_same(weights(model), weights(twin))
