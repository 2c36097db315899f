"""How often prompts with one beginning come, so that one that most ask for is worth more places. Pure: who asks tells
the time, in seconds of whatever clock, which may not go back."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from gateway.answers import MAX_MODELS

if TYPE_CHECKING:
    from kvstore.block_hash import BlockHash

MEMORY_S: Final = 10.0
"""What came so long ago counts a third."""
MOST: Final = 4096
"""Beginnings that are remembered: what was asked for least lately is forgotten."""
HOT: Final = 0.5
"""Of all prompts so many must begin alike. Each place for what fewer ask for takes one from what others ask for, and
where several beginnings push each other out, more and more is computed anew until nobody is idle any more."""


class Repeats:
    """Counts that fade, by the hash of a beginning's last block."""

    def __init__(self, *, memory_s: float = MEMORY_S, most: int = MOST) -> None:
        self._memory_s = memory_s
        self._most = most
        self._seen: OrderedDict[BlockHash, tuple[float, float]] = OrderedDict()
        """How many came, and when the last one did."""
        self._all = (0.0, 0.0)
        """Of whatever beginning."""

    def note(self, beginning: BlockHash | None, now: float) -> float:
        """One more has come: how many a second did before, if it was most of all; else 0. None: one that nobody has."""
        total = self._faded(self._all, now)
        self._all = total + 1.0, now
        if beginning is None:
            return 0.0
        before = self._faded(self._seen.pop(beginning, (0.0, now)), now)
        self._seen[beginning] = before + 1.0, now
        if len(self._seen) > self._most:
            self._seen.popitem(last=False)
        return before / self._memory_s if before > HOT * total else 0.0

    def _faded(self, seen: tuple[float, float], now: float) -> float:
        count, last = seen
        return count * math.exp((last - now) / self._memory_s)

    def __len__(self) -> int:
        return len(self._seen)


class ModelRepeats:
    """Of each model by itself: what others are asked says nothing of what is most of its prompts."""

    def __init__(self, *, models: int = MAX_MODELS) -> None:
        self._most = models
        self._of: OrderedDict[str, Repeats] = OrderedDict()

    def of(self, model: str) -> Repeats:
        """The model's own. What was asked for longest ago is forgotten."""
        known = self._of.pop(model, None)
        known = Repeats() if known is None else known
        self._of[model] = known
        while len(self._of) > self._most:
            self._of.popitem(last=False)
        return known

    def __len__(self) -> int:
        return len(self._of)
