"""What a sequence has said so far, as the penalties need it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt


class TokenCounts:
    """How often each token is in a sequence's output, and which tokens its prompt has.

    Kept as two arrays that grow, so that a step reads them as they are.
    """

    __slots__ = ("_counts", "_ids", "_slots")

    def __init__(self, prompt: Iterable[int], output: Iterable[int] = ()) -> None:
        self._slots = {token_id: slot for slot, token_id in enumerate(dict.fromkeys(prompt))}
        """Where a token is in the arrays."""
        room = 2 * len(self._slots) + 16
        self._ids = np.zeros(room, dtype=np.int64)
        self._ids[: len(self._slots)] = list(self._slots)
        self._counts = np.zeros(room, dtype=np.int64)
        for token_id in output:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """The output has one more token."""
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token_id
        self._counts[slot] += 1

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Every token in the prompt or the output, once. A view: only to be read, and not after the next ``add``."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """How often the output has each of them. A view, as ``ids``."""
        return self._counts[: len(self._slots)]
