"""Steps that gather statistics run eagerly, because compiled code calls no hook that it was not compiled with.

While an optimizer requires statistics, the stance of ``torch.compile`` is ``force_eager``: compiled code is not used,
and is kept as it is. It has no hook of ours in it, no graph break, and is not compiled again.
"""

import sys
import weakref
from dataclasses import fields
from typing import Any

import torch


class EagerWindow:
    """The time during which compiled code is not used, for all optimizers of the process together."""

    def __init__(self) -> None:
        self._holders: dict[int, weakref.ref[object]] = {}  # by identity; weak, so that holding keeps nobody alive
        self._ours: Any = None  # the stance that was set here
        self._before: Any = None  # what to go back to

    def hold(self, holder: object, wanted: bool) -> None:
        """Open the window for a holder, or close it.

        Args:
            holder: whoever wants statistics; one that is dropped wants none.
            wanted: whether it wants them now.
        """
        key = id(holder)
        if not wanted:
            self._holders.pop(key, None)
        elif key not in self._holders:

            def dropped(reference: weakref.ref[object]) -> None:
                if not sys.is_finalizing() and self._holders.get(key) is reference:
                    del self._holders[key]
                    self._settle()

            self._holders[key] = weakref.ref(holder, dropped)
        self._settle()

    def _settle(self) -> None:
        if self._holders:
            self._open()
        elif self._ours is not None:
            self._close()

    def _open(self) -> None:
        from torch._dynamo import eval_frame

        if self._ours is not None and eval_frame._stance is self._ours:
            return
        # also where the user has set a stance since: it holds again once statistics are no longer waited for
        if self._ours is not None:
            self._retire()
        self._before = eval_frame._stance
        torch.compiler.set_stance("force_eager")
        self._ours = eval_frame._stance

    def _close(self) -> None:
        from torch._dynamo import eval_frame

        if eval_frame._stance is self._ours:  # else the user has set another one since, and it stays
            eval_frame._set_stance(self._before)
        self._retire()
        self._ours = self._before = None

    def _retire(self) -> None:
        """Have our stance mean what held before it: a context that was entered under it puts it back on leaving."""
        for field in fields(self._before):
            setattr(self._ours, field.name, getattr(self._before, field.name))


eager_window = EagerWindow()
