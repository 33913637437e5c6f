"""Factors in the expand setting from an implementation that nobody here wrote."""

from torch import nn


def curvlinops_factors(model, x, labels, fisher_type):
    """The input factors of all layers, which are A, and the gradient factors, which are Σ g gᵀ / N: T · G."""
    from curvlinops import KFACLinearOperator  # warns when it is imported

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
