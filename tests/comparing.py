"""THOR beside its oracle: weights after steps, factors after a refresh."""

import numpy as np
import pytest
from torch import nn

from reference import ReferenceTHOR, by_stages, damped, factors_of, gradients
from tiny import as_list
from torch_thor import THOR

DAMPING = 0.07


def assert_same_weights(model, reference, step, rtol=1e-8):
    wanted = dict(reference.model.named_parameters())
    for name, parameter in model.named_parameters():
        found, expected = parameter.detach().numpy(), wanted[name].detach().numpy()
        where = f"{name} after step {step}"
        np.testing.assert_allclose(found, expected, rtol=rtol, atol=1e-10, err_msg=where)


def assert_same_steps(model, optimizer, reference, stream, rtol=1e-8):
    """Both take the same steps: all weights agree after each."""
    for step, (x, loss) in enumerate(stream):
        loss(model(*x) if isinstance(x, tuple) else model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.step((x, loss))
        assert_same_weights(model, reference, step, rtol)


def compare(
    model,
    stream,
    *,
    forward=by_stages,
    reference_options=None,
    thor_options=None,
    rtol=1e-8,
    **options,
):
    """Both optimizers take the same steps; returns (THOR, reference).

    Nothing bounds the steps unless `options` say so: a bound hides how wrong a direction is.
    """
    options = {"max_update_ratio": None, **options}
    reference = ReferenceTHOR(model, forward=forward, **{**options, **(reference_options or {})})
    optimizer = THOR(model, **options, **(thor_options or {}))
    trained = [p for p in model.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in trained]
    assert_same_steps(model, optimizer, reference, stream, rtol)
    assert not any(p.equal(old) for p, old in zip(trained, start, strict=True))
    return optimizer, reference


def refreshed(model, x, loss, **options):
    """THOR after one step that moves nothing."""
    optimizer = THOR(model, lr=0.0, damping=DAMPING, **options)
    loss(model(*x) if isinstance(x, tuple) else model(x)).backward()
    optimizer.step()
    return optimizer


def assert_factors(got, expected):
    """Factors, inverses and T of one layer equal the results of explicit loops."""
    assert got.rows_per_term == pytest.approx(expected.rows_per_term, rel=1e-12)
    for dense, inverse, wanted in zip(
        got.factors(), got.inverses(), (expected.A, expected.G), strict=True
    ):
        assert len(as_list(dense)) == len(as_list(inverse)) == len(wanted)
        for factor, inverted, want in zip(as_list(dense), as_list(inverse), wanted, strict=True):
            np.testing.assert_allclose(factor.numpy(), want, rtol=1e-10, atol=1e-13)
            want_inverse = np.linalg.inv(damped(want, DAMPING, expected.rows_per_term))
            np.testing.assert_allclose(inverted.numpy(), want_inverse, rtol=1e-9, atol=1e-9)


def assert_matches_reference(
    model,
    x,
    loss,
    *,
    terms,
    split_dim,
    scale=None,
    forward=by_stages,
    mask=None,
    optimizer=None,
    **options,
):
    """Factors, inverses and T of every layer are what the explicit loops give. Returns THOR."""
    if optimizer is None:
        optimizer = refreshed(model, x, loss, split_dim=split_dim, **options)
    _, uses = gradients(model, x, loss, forward)
    assert set(optimizer.curvature) == set(uses)
    modules = dict(model.named_modules())
    for name, pairs in uses.items():
        projection = name.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj", "out_proj")
        expected = factors_of(
            None if projection else modules[name], pairs, terms, scale or terms, split_dim, mask
        )
        assert_factors(optimizer.curvature[name], expected)
    return optimizer


def having(optimizer, **attributes):
    """Return an optimizer with some attributes set, such as ``loss_terms``."""
    for name, value in attributes.items():
        assert hasattr(optimizer, name)
        setattr(optimizer, name, value)
    return optimizer


def curvlinops_factors(model, x, labels, fisher_type):
    """Factors of the Fisher matrix, expand setting, by an implementation that others wrote."""
    from curvlinops import KFACLinearOperator

    operator = KFACLinearOperator(
        model,
        nn.CrossEntropyLoss(),
        list(model.parameters()),
        [(x, labels)],
        fisher_type=fisher_type,
        kfac_approx="expand",
        check_deterministic=False,
    )
    operator.compute_kronecker_factors()
    state = operator.state_dict()
    return state["input_covariances"], state["gradient_covariances"]
