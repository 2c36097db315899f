"""The list of free blocks in runs: what contradicts itself is noticed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.worker.test_block_pool_runs import pool_of
from worker.scheduling.block import IntegrityError
from worker.scheduling.free_list import FreeRuns

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda free: free._past.update({8: 11}), "lost or in two states"),
        (lambda free: free._first.clear(), "can't be found"),
        (lambda free: free._classes[2].clear(), "can't be found"),
        (lambda free: free._classes[0].update({1: None}), "traces"),
        (lambda free: free._claims.update({7: free._close(8)}), "lost or in two states"),
        (lambda free: setattr(free, "_count", 3), "counted as free"),
    ],
)
def test_integrity_notices_what_contradicts_itself(fault: Callable[[FreeRuns], object], message: str) -> None:
    pool = pool_of(12)
    table = pool.allocate(2) or []
    pool.allocate(1)
    table += pool.allocate(1, table) or []
    assert table == [0, 1, 3]
    assert pool.allocate(2) == [6, 7]
    pool.check_integrity()
    free = pool._free
    assert isinstance(free, FreeRuns)
    assert (free._claims, free._past) == ({4: 6}, {8: 12})
    fault(free)
    with pytest.raises(IntegrityError, match=message):
        pool.check_integrity()


def test_integrity_notices_a_claim_that_nobody_has() -> None:
    free = FreeRuns(8, 4)
    assert free.take(1, [5, 6, 7]) == [0]
    assert free._claims == {1: 4}
    free.check_integrity([0])
    with pytest.raises(IntegrityError, match="nobody can go on"):
        free.check_integrity([5, 6, 7])


def test_integrity_notices_open_stretches_that_touch() -> None:
    free = FreeRuns(8, 4)
    free.check_integrity([])
    free._close(0)
    for first, past in ((0, 3), (3, 8)):
        free._past[first], free._first[past] = past, first
        free._classes[(past - first).bit_length() - 1][first] = None
    with pytest.raises(IntegrityError, match="ends before free blocks"):
        free.check_integrity([])
