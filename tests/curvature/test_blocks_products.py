"""Products in float32: exact to its rounding by any library, and the user's settings stay."""

from itertools import product as pairs

import pytest
import torch

from torch_thor.curvature import blocks
from torch_thor.curvature.blocks import add_product_, ieee_float32, product

find_out = blocks._onednn_is_exact.__wrapped__  # not the answer that was kept

# count, m, k, n: the first is too small for the faster library
SHAPES = [(2, 3, 4, 5), (1, 128, 784, 128), (3, 96, 160, 128), (1, 784, 128, 128), (40, 65, 33, 70)]
LAYOUTS = ["rows", "columns", "strided"]


def matrices(count, rows, columns, layout="rows"):
    if layout == "columns":
        return torch.randn(count, columns, rows).mT
    wide = {"rows": columns, "strided": 2 * columns, "column of blocks": columns + 7}[layout]
    return torch.randn(count, rows, wide)[..., :: 2 if layout == "strided" else 1][..., :columns]


@pytest.fixture(params=["as it is", "never", "always"])
def library(request, monkeypatch):
    if request.param == "always" and not find_out():
        pytest.skip("this processor's oneDNN rounds to bfloat16")
    if request.param != "as it is":
        monkeypatch.setattr(blocks, "_onednn_is_exact", lambda: request.param == "always")


@pytest.mark.usefixtures("library")
def test_products_are_exact():
    """And what is overwritten does not matter."""
    for count, m, k, n in SHAPES:
        for of_a, of_b in pairs(LAYOUTS, LAYOUTS):
            a, b = matrices(count, m, k, of_a), matrices(count, k, n, of_b)
            with ieee_float32("cpu"):
                error = (product(a, b) - a.double() @ b.double()).abs()
            bound = 2e-6 * (a.double().abs() @ b.double().abs())
            assert (error <= bound).all(), (m, k, n, of_a, of_b)
        a, b = matrices(count, m, k), matrices(count, k, n)
        for layout in (*LAYOUTS, "column of blocks"):
            into = matrices(count, m, n, layout)
            exact = 0.3 * into.double() - 2 * (a.double() @ b.double())
            bound = 4e-6 * (a.double().abs() @ b.double().abs() + into.double().abs())
            with ieee_float32("cpu"):
                add_product_(into, a, b, 0.3, -2.0)
            assert ((into - exact).abs() <= bound).all(), (m, k, n, layout)
    for dtype in (torch.float32, torch.float64):
        a, b = torch.randn(2, 1, 128, 128, dtype=dtype)
        into = torch.full((1, 128, 128), torch.nan, dtype=dtype)
        with ieee_float32("cpu"):
            add_product_(into, a, b, 0.0)
            torch.testing.assert_close(into, product(a, b))


def test_the_settings_are_the_users_again():
    matmul = torch.backends.mkldnn.matmul
    was, of_all = matmul.fp32_precision, torch.backends.fp32_precision
    try:
        for before in ("ieee", "bf16", "none"):
            matmul.fp32_precision = before
            given = matmul.fp32_precision
            find_out()
            assert matmul.fp32_precision == given
            with ieee_float32("cpu"):
                product(torch.randn(1, 128, 128), torch.randn(1, 128, 128))
                assert matmul.fp32_precision == "ieee"
            assert matmul.fp32_precision == given
        torch.backends.fp32_precision = "bf16"  # what is inherited stays so
        with ieee_float32("cpu"):
            pass
        assert matmul.fp32_precision == "bf16"
        torch.backends.fp32_precision = "ieee"
        assert matmul.fp32_precision == "ieee"
    finally:
        torch.backends.fp32_precision = of_all
        matmul.fp32_precision = was


def test_a_library_that_rounds_to_bfloat16_is_not_taken(monkeypatch):
    bmm = torch.bmm

    def rounding(a, b):
        if a.dtype == torch.float32:
            a, b = a.bfloat16().float(), b.bfloat16().float()
        return bmm(a, b)

    monkeypatch.setattr(torch, "bmm", rounding)
    assert not find_out()
