"""Evaluations of a classifier, made by hand for tests of reports and figures."""

from torch_thor.training import Score

NAMES = ("loss", "top1", "top5")


def accuracy_point(step, seconds, *metrics):
    """The score of a step: loss, top-1, top-5, perhaps followed by the same of averaged weights."""
    own, averaged = (dict(zip(NAMES, values, strict=False)) for values in (metrics[:3], metrics[3:]))
    return Score(step, seconds, own, averaged or None)
