"""Shared by all tests: one thread (two cores are shared by many processes) and a fixed seed."""

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("torch_thor", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.load_profile("torch_thor")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
