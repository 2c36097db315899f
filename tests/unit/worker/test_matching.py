"""Masks less the tokens that are banned."""

from __future__ import annotations

import numpy as np
import pytest

from worker.matching import without


@pytest.mark.parametrize(
    ("banned", "left"),
    [
        ([], [0b1011, 1 << 31]),
        ([0], [0b1010, 1 << 31]),
        ([1, 63], [0b1001, 0]),
        ([2, 40], [0b1011, 1 << 31]),
        ([0, 1, 3], [0, 1 << 31]),
        ([64, 2**31], [0b1011, 1 << 31]),  # the vocabulary has none of them
    ],
)
def test_what_is_banned_is_no_longer_there(banned: list[int], left: list[int]) -> None:
    mask = np.array([0b1011, 1 << 31], dtype=np.uint32)
    assert without(mask, banned).tolist() == left
    assert mask.tolist() == [0b1011, 1 << 31]


def test_a_ban_of_all_gives_way() -> None:
    assert without(np.array([0b1011, 1 << 31], dtype=np.uint32), [0, 1, 3, 63]).tolist() == [0b1011, 1 << 31]
