"""Errors of libraries become lines that a user can act on; all others stay as they are."""

import pytest

from torch_thor.errors import UserError, explaining, first_line


class OwnError(UserError):
    """A kind of its own."""


@pytest.mark.parametrize("kind", [UserError, OwnError])
def test_the_named_kinds_are_explained(kind):
    with (
        pytest.raises(kind) as caught,
        explaining((TypeError, ValueError), lambda error: f"lr: {first_line(error)}", kind),
    ):
        float("one\ntwo:")
    assert type(caught.value) is kind
    assert str(caught.value) == "lr: could not convert string to float: 'one\\ntwo:'"
    assert type(caught.value.__cause__) is ValueError


def test_other_kinds_and_success_pass():
    with pytest.raises(KeyError, match="two"), explaining(ValueError, str):
        raise KeyError("two")
    with explaining(ValueError, str):
        number = float("1")
    assert number == 1.0
