"""Functions on several ranks."""

import pytest


@pytest.fixture
def run(pool, tmp_path):
    """Run a function of (rank, world, ...) on so many ranks: run(world, function, ...)."""

    def on_ranks(world, function, *args, **options):
        return pool.run(world, tmp_path, function, *args, **options)

    return on_ranks
