"""One pool of processes for all tests of this folder."""

import pytest

from ranks import Ranks


@pytest.fixture(scope="session")
def pool():
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.fixture
def run(pool, tmp_path):
    """Run a function of (rank, world, ...) on so many ranks: run(world, function, ...)."""

    def on_ranks(world, function, *args, **options):
        return pool.run(world, tmp_path, function, *args, **options)

    return on_ranks
