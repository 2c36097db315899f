"""Random numbers that are a function of (seed, choice, position): nothing is kept, so nothing can get out of step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Words = npt.NDArray[np.uint64]
    """32-bit words, kept in 64 bits so that a product loses nothing."""

ROUNDS: Final = 10
MASK: Final = np.uint64(0xFFFFFFFF)
HALF: Final = np.uint64(32)
MULTIPLIERS: Final = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
WEYL: Final = np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64) * np.arange(ROUNDS, dtype=np.uint64)[:, None]
"""What is added to the two words of the key in each round, ``[rounds, 2]``."""


def uniforms(
    seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int], count: int = 1
) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1), multiples of 2^-53, from Philox4x32-10 with the seed as its key: ``[count, rows]``."""
    key, choice, position = (np.array(column, dtype=np.uint64) for column in (seeds, choices, positions))
    counter = np.empty((4, count, len(key)), dtype=np.uint64)
    counter[0], counter[1], counter[2] = position & MASK, position >> HALF, choice & MASK
    counter[3] = np.arange(count, dtype=np.uint64)[:, None]
    keys = np.empty((2, count, len(key)), dtype=np.uint64)
    keys[0], keys[1] = key & MASK, key >> HALF
    high, low, *_ = philox(counter.reshape(4, -1), keys.reshape(2, -1))
    numbers: npt.NDArray[np.float64] = ((high << HALF | low) >> np.uint64(11)).astype(np.float64)
    return numbers.reshape(count, len(key)) * 2.0**-53


def philox(counter: Words, key: Words) -> Words:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

    ``counter`` is ``[4, n]``, ``key`` ``[2, n]``; returns ``[4, n]``. Words 0 and 2 of the counter are multiplied, 1
    and 3 mixed in; then the pairs change places.
    """
    keys = key + WEYL[:, :, None] & MASK
    even, odd = counter[0::2], counter[1::2]
    for round_key in keys:
        product = even * MULTIPLIERS
        high = product >> HALF
        product &= MASK
        even = high[::-1] ^ odd
        even ^= round_key
        odd = product[::-1]
    return np.array([even[0], odd[0], even[1], odd[1]])
