"""Refresh steps run eagerly: compiled code calls no hook that it was not compiled with.

While any optimizer waits for statistics, ``torch.compile`` is told to stand aside (``force_eager``): compiled code
stays as it is, with no hook of ours, no graph break and nothing to recompile, and the steps that need hooks run
without it.
"""

import weakref

import torch


class EagerWindow:
    """The time during which compiled code is not used, for all optimizers of the process together."""

    def __init__(self) -> None:
        self._holders: weakref.WeakSet[object] = weakref.WeakSet()
        self._before: object | None = None

    def hold(self, holder: object, wanted: bool) -> None:
        """Open the window for a holder, or close it.

        Args:
            holder: whoever wants statistics; one that is dropped wants none.
            wanted: whether it wants them now.
        """
        if wanted:
            if holder not in self._holders:
                self._holders.add(holder)
                weakref.finalize(holder, self._settle)
        else:
            self._holders.discard(holder)
        self._settle()

    def _settle(self) -> None:
        held = any(True for _ in self._holders)  # its length counts one that is just being dropped
        if held and self._before is None:
            self._before = torch.compiler.set_stance("force_eager")
        elif not held and self._before is not None:
            # leaving the context puts back what was there before, be it the user's own stance
            self._before.__exit__(None, None, None)  # type: ignore[attr-defined]
            self._before = None


eager_window = EagerWindow()
