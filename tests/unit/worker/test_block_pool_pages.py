"""What a pool tells for pages: names of what is cached and of what was evicted, and what is in doubt."""

from __future__ import annotations

import pytest

from kvstore.page import PageName, names_of
from tests.unit.worker.blocks import BS, ROOT, fill, grow, hashes, match, tokens
from worker.scheduling.block import IntegrityError
from worker.scheduling.block_pool import BlockPool


def names(*blocks: int) -> list[PageName]:
    return names_of(ROOT, tuple(tokens(*blocks)), BS)


def watched(num_blocks: int, cache_blocks: int | None = None) -> BlockPool:
    pool = BlockPool(num_blocks, BS, cache_blocks)
    pool.keeps_evicted = True
    return pool


def test_offered_blocks_have_the_names_of_their_pages() -> None:
    pool = BlockPool(6, BS)
    table = fill(pool, tokens(1, 2, 3))
    assert [pool.name_of(block) for block in table] == names(1, 2, 3)
    (free,) = pool.allocate(1) or []
    with pytest.raises(IntegrityError, match="isn't offered"):
        pool.name_of(free)


def test_what_is_evicted_is_told_in_order_and_once() -> None:
    pool = watched(4)
    pool.free(fill(pool, tokens(1, 2, 3)))
    pool.allocate(3)
    assert pool.take_evicted() == [(2, names(1, 2, 3)[2]), (1, names(1, 2)[1])]
    assert pool.take_evicted() == []


def test_what_the_limit_evicts_is_told_too() -> None:
    pool = watched(6, cache_blocks=1)
    pool.free(fill(pool, tokens(1, 2, 3)))
    assert [name.position for _, name in pool.take_evicted()] == [2, 1]


def test_what_is_forgotten_or_cleared_is_not_evicted() -> None:
    pool = watched(6)
    table = fill(pool, tokens(1, 2))
    tail = grow(pool, table[:1], tokens(1, 3))
    assert pool.forget(table[1:]) == hashes(tokens(1, 2))[1:]
    assert pool.forget(tail[:1]) == [hashes(tokens(1))[0], hashes(tokens(1, 3))[1]]
    assert pool.forget(table) == []
    pool.free(tail)
    pool.free(table)
    pool.free(fill(pool, tokens(5)))
    pool.clear()
    assert pool.take_evicted() == []


def test_without_anybody_who_takes_them_no_names_are_kept() -> None:
    pool = BlockPool(2, BS)
    pool.free(fill(pool, tokens(1, 2)))
    pool.allocate(2)
    assert pool.take_evicted() == []


def test_a_prefix_is_found_by_its_hash() -> None:
    pool = BlockPool(6, BS)
    table = fill(pool, tokens(1, 2, 3))
    tail = grow(pool, table[:1], tokens(1, 4))
    assert pool.table_of(hashes(tokens(1, 2, 3))[-1]) == table
    assert pool.table_of(hashes(tokens(1, 4))[-1]) == tail
    assert pool.table_of(hashes(tokens(4))[-1]) == []
    assert pool.table_of(ROOT) == []


def test_what_is_cached_is_told_hottest_first_and_beginnings_before_their_ends() -> None:
    pool = BlockPool(6, BS)
    used = fill(pool, tokens(5))
    for blocks in ((1, 2), (3, 4)):
        pool.free(fill(pool, tokens(*blocks)))
    assert pool.cached() == [*names(3, 4), *names(1, 2)]
    hits = match(pool, tokens(1, 2))
    pool.share(hits)
    assert pool.cached() == names(3, 4)
    pool.free(hits)
    pool.free(used)
    assert pool.cached() == [*names(5), *names(1, 2), *names(3, 4)]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("index", 2, "is of another prefix"), ("root", b"r" * 32, "is of another prefix")],
)
def test_names_that_contradict_each_other_are_noticed(field: str, value: object, message: str) -> None:
    pool = BlockPool(6, BS)
    table = fill(pool, tokens(1, 2))
    setattr(pool._blocks[table[1]], field, value)
    with pytest.raises(IntegrityError, match=message):
        pool.check_integrity()
    setattr(pool._blocks[table[0]], field, value)
    with pytest.raises(IntegrityError, match="is no first one"):
        pool.check_integrity()
