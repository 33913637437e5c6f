"""Products in float32: exact to its rounding by any library, and the user's settings stay."""

from itertools import product as pairs

import pytest
import torch

from torch_thor.curvature import blocks
from torch_thor.curvature.blocks import add_product_, ieee_float32, product

find_out = blocks._onednn_is_exact.__wrapped__  # computes the answer again

# count, m, k, n: the first is too small for the faster library
SHAPES = [(2, 3, 4, 5), (1, 128, 784, 128), (3, 96, 160, 128), (40, 65, 33, 70)]
LAYOUTS = ["rows", "columns", "strided"]


def matrices(count, rows, columns, layout="rows"):
    if layout == "columns":
        return torch.randn(count, columns, rows).mT
    wide = {"rows": columns, "strided": 2 * columns, "column of blocks": columns + 7}[layout]
    return torch.randn(count, rows, wide)[..., :: 2 if layout == "strided" else 1][..., :columns]


@pytest.mark.parametrize("library", ["as it is", "never", "always"])
def test_products_are_exact(library, monkeypatch):
    if library == "always" and not find_out():
        pytest.skip("this processor's oneDNN rounds to bfloat16")
    if library != "as it is":
        monkeypatch.setattr(blocks, "_onednn_is_exact", lambda: library == "always")
    for count, m, k, n in SHAPES:
        for left, right in pairs(LAYOUTS, LAYOUTS):
            a, b = matrices(count, m, k, left), matrices(count, k, n, right)
            with ieee_float32("cpu"):
                error = (product(a, b) - a.double() @ b.double()).abs()
            bound = 2e-6 * (a.double().abs() @ b.double().abs())
            assert (error <= bound).all(), (m, k, n, left, right)
        a, b = matrices(count, m, k), matrices(count, k, n)
        for layout in (*LAYOUTS, "column of blocks"):
            into = matrices(count, m, n, layout)
            exact = 0.3 * into.double() - 2 * (a.double() @ b.double())
            bound = 4e-6 * (a.double().abs() @ b.double().abs() + into.double().abs())
            with ieee_float32("cpu"):
                add_product_(into, a, b, 0.3, -2.0)
            assert ((into - exact).abs() <= bound).all(), (m, k, n, layout)


def test_the_settings_are_the_users_again():
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    try:
        for setting in ("ieee", "bf16", "none"):
            matmul.fp32_precision = setting
            given = matmul.fp32_precision
            find_out()
            assert matmul.fp32_precision == given
            with ieee_float32("cpu"):
                product(torch.randn(1, 128, 128), torch.randn(1, 128, 128))
                assert matmul.fp32_precision == "ieee"
            assert matmul.fp32_precision == given
    finally:
        matmul.fp32_precision = before


def test_a_library_that_rounds_to_bfloat16_is_not_taken(monkeypatch):
    bmm = torch.bmm

    def rounding(a, b):
        if a.dtype == torch.float32:
            a, b = a.bfloat16().float(), b.bfloat16().float()
        return bmm(a, b)

    monkeypatch.setattr(torch, "bmm", rounding)
    assert not find_out()
