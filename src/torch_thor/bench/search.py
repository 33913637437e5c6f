"""The search for the best setting of a method: settings are tried with one seed, and the best one runs with others."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

TUNING_SEED = 10  # used for nothing else
SEEDS = (0, 1, 2)

AnyRun = TypeVar("AnyRun")  # a frozen dataclass with a field `seed`


@dataclass(frozen=True)
class Search(Generic[AnyRun]):
    """The runs that find the best setting of one method, and the runs that measure it.

    The seed of the tuning differs from those of the measurement, so that the result does not profit from the choice.

    Args:
        tries: A run with the tuning seed for each setting; frozen dataclasses with a field `seed`.
        score: Returns the score of a run that is finished; the setting with the highest score is the best one.
        seeds: The seeds of the measurement.
    """

    tries: Sequence[AnyRun]
    score: Callable[[AnyRun], float]
    seeds: Sequence[int] = SEEDS

    def best(self) -> AnyRun:
        """Return the run with the tuning seed that has the highest score; of equal ones, the first."""
        return max(self.tries, key=self.score)

    def chosen(self) -> list[AnyRun]:
        """List the runs of the best setting, one for each seed of the measurement."""
        best: Any = self.best()
        return [replace(best, seed=seed) for seed in self.seeds]


def stages(searches: Callable[[], Iterable[Search[AnyRun]]]) -> list[Callable[[], list[AnyRun]]]:
    """Return the two stages of several searches, as :func:`torch_thor.bench.script.measure` takes them.

    Args:
        searches: Returns the searches. It is called when a stage begins, when all results of earlier stages are stored.

    Returns:
        The stage of all runs with the tuning seed, and the stage of the chosen ones.
    """
    return [
        lambda: [run for search in searches() for run in search.tries],
        lambda: [run for search in searches() for run in search.chosen()],
    ]
