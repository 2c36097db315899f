"""The form that an answer is to have, as the engine knows it. Pure; what does the work is ``worker.grammar``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    Mask = npt.NDArray[np.uint32]
    """Which tokens can be chosen: bit ``id % 32`` of word ``id // 32``, for the whole vocabulary at least."""


class Matcher(Protocol):
    """How far one choice has come in its form."""

    def mask(self) -> Mask:
        """The tokens that may come next: the model's end tokens too, where the text may end. The caller's own.

        Raises MatchError when there are none, when it takes too much to find them, or after tokens that can't be.
        """

    def accept(self, token_ids: Sequence[int]) -> bool:
        """The text goes on with these, which are no end tokens. Whether it is whole now, and nothing can follow."""


class Grammar(Protocol):
    """A form that was compiled."""

    def start(self) -> Matcher:
        """For a choice that has said nothing yet."""


class MatchError(Exception):
    """An answer can't go on in its form. The text says why, for the caller to read."""


def without(mask: Mask, banned: Iterable[int]) -> Mask:
    """A mask less some tokens; as it is where nothing would be left: the form counts for more than a ban."""
    left = mask.copy()
    for token_id in banned:
        if token_id >> 5 < len(left):
            left[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
    return left if left.any() else mask
