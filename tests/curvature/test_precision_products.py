"""Products in float32: exact to its rounding by whichever library, and the user's settings stay as they are."""

import pytest
import torch

from torch_thor.curvature import precision
from torch_thor.curvature.precision import add_product_, ieee_float32, product

find_out = precision._onednn_is_exact.__wrapped__  # not the answer that was kept

# count, m, k, n: the first is too small for the faster library
SHAPES = [(2, 3, 4, 5), (1, 128, 784, 128), (3, 96, 160, 128), (1, 784, 128, 128), (40, 65, 33, 70)]
LAYOUTS = ["rows", "columns", "strided"]


def matrices(count, rows, columns, layout, dtype=torch.float32):
    if layout == "rows":
        return torch.randn(count, rows, columns, dtype=dtype)
    if layout == "columns":
        return torch.randn(count, columns, rows, dtype=dtype).mT
    return torch.randn(count, rows, 2 * columns, dtype=dtype)[..., ::2]


@pytest.fixture(params=["as it is", "never", "always"])
def library(request, monkeypatch):
    if request.param != "as it is":
        monkeypatch.setattr(precision, "_onednn_is_exact", lambda: request.param == "always")
    return request.param


@pytest.mark.parametrize("b_layout", LAYOUTS)
@pytest.mark.parametrize("a_layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_exact(shape, a_layout, b_layout, library):
    if library == "always" and not find_out():
        pytest.skip("this processor's oneDNN rounds to bfloat16")
    count, m, k, n = shape
    a, b = matrices(count, m, k, a_layout), matrices(count, k, n, b_layout)
    exact = a.double() @ b.double()
    bound = 2e-6 * (a.double().abs() @ b.double().abs())
    with ieee_float32("cpu"):
        assert ((product(a, b) - exact).abs() <= bound).all()


@pytest.mark.parametrize("layout", [*LAYOUTS, "column of blocks"])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_added(shape, layout, library):
    if library == "always" and not find_out():
        pytest.skip("this processor's oneDNN rounds to bfloat16")
    count, m, k, n = shape
    a, b = matrices(count, m, k, "rows"), matrices(count, k, n, "rows")
    into = matrices(count, m, n + 7, "rows")[..., :n] if layout == "column of blocks" else matrices(count, m, n, layout)
    exact = 0.3 * into.double() - 2 * (a.double() @ b.double())
    bound = 4e-6 * (a.double().abs() @ b.double().abs() + into.double().abs())
    with ieee_float32("cpu"):
        add_product_(into, a, b, 0.3, -2.0)
    assert ((into - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_overwritten_does_not_matter(dtype, library):
    a, b = torch.randn(1, 128, 128, dtype=dtype), torch.randn(1, 128, 128, dtype=dtype)
    into = torch.full((1, 128, 128), float("nan"), dtype=dtype)
    with ieee_float32("cpu"):
        add_product_(into, a, b, 0.0)
        torch.testing.assert_close(into, product(a, b))


@pytest.mark.parametrize("before", ["ieee", "bf16", "none"])
def test_the_settings_are_the_users_again(before):
    matmul = torch.backends.mkldnn.matmul
    was = matmul.fp32_precision
    try:
        matmul.fp32_precision = before
        given = matmul.fp32_precision
        find_out()
        assert matmul.fp32_precision == given
        with ieee_float32("cpu"):
            product(torch.randn(1, 128, 128), torch.randn(1, 128, 128))
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == given
    finally:
        matmul.fp32_precision = was


def test_a_library_that_rounds_to_bfloat16_is_not_taken(monkeypatch):
    bmm = torch.bmm
    monkeypatch.setattr(
        torch,
        "bmm",
        lambda a, b: bmm(a.bfloat16().to(a.dtype), b.bfloat16().to(b.dtype)) if a.dtype == torch.float32 else bmm(a, b),
    )
    assert not find_out()
