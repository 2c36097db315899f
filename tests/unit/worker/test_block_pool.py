"""The block pool: exact block ids, exact eviction order, books that balance."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.worker.blocks import BS, counts, fill, grow, match, seal, tokens
from worker.scheduling.block import IntegrityError
from worker.scheduling.block_pool import BlockPool

if TYPE_CHECKING:
    from collections.abc import Callable


def test_blocks_are_handed_out_in_order_and_reused_last_freed_first() -> None:
    pool = BlockPool(6, BS)
    assert pool.allocate(2) == [0, 1]
    table = pool.allocate(3)
    assert table == [2, 3, 4]
    assert counts(pool) == (1, 0, 5)
    pool.free(table)
    assert counts(pool) == (4, 0, 2)
    assert pool.allocate(4) == [2, 3, 4, 5]


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(3, BS)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(2) is None
    assert counts(pool) == (1, 0, 2)
    assert pool.allocate(0) == []
    assert pool.allocate(1) == [2]
    assert pool.allocate(1) is None


def test_sharing_a_cached_block_takes_it_out_of_eviction() -> None:
    pool = BlockPool(3, BS)
    table = fill(pool, tokens(1, 2))
    pool.free(table)
    hits = match(pool, tokens(1))
    pool.share(hits)
    assert counts(pool) == (1, 1, 1)
    assert pool.allocate(2) == [2, 1]
    assert pool.evictions == 1
    assert match(pool, tokens(1, 2)) == [0]


def test_a_block_is_used_until_its_last_reference_is_gone() -> None:
    pool = BlockPool(3, BS)
    table = fill(pool, tokens(1))
    pool.share(table)
    pool.free(table)
    assert pool.refs(0) == 1
    assert counts(pool) == (2, 0, 1)
    pool.free(table)
    assert pool.refs(0) == 0
    assert counts(pool) == (2, 1, 0)


def test_tails_are_evicted_before_heads_and_the_least_recently_freed_first() -> None:
    pool = BlockPool(6, BS)
    older, newer = fill(pool, tokens(1, 2, 3)), fill(pool, tokens(5, 6, 7))
    pool.free(older)
    pool.free(newer)
    assert [pool.allocate(1) for _ in range(6)] == [[2], [1], [0], [5], [4], [3]]
    assert pool.evictions == 6


def test_free_blocks_go_before_any_is_evicted() -> None:
    pool = BlockPool(4, BS)
    table = fill(pool, tokens(1, 2))
    pool.free(table)
    assert pool.allocate(3) == [2, 3, 1]
    assert pool.evictions == 1


def test_a_head_shared_by_two_outlives_both_tails() -> None:
    pool = BlockPool(5, BS)
    first = fill(pool, tokens(1, 2))
    second = grow(pool, match(pool, tokens(1, 3)), tokens(1, 3))
    assert (first, second) == ([0, 1], [0, 2])
    pool.free(second)
    pool.free(first)
    assert pool.allocate(2) == [3, 4]
    assert [pool.allocate(1) for _ in range(3)] == [[2], [1], [0]]


def test_a_hit_renews_a_block() -> None:
    pool = BlockPool(2, BS)
    for block in (1, 2):
        pool.free(fill(pool, tokens(block)))
    hits = match(pool, tokens(1))
    pool.share(hits)
    pool.free(hits)
    assert pool.allocate(1) == [1]


def test_at_most_so_many_blocks_stay_cached_and_the_head_stays_longest() -> None:
    pool = BlockPool(8, BS, cache_blocks=2)
    table = fill(pool, tokens(1, 2, 3, 4))
    pool.free(table)
    assert counts(pool) == (6, 2, 0)
    assert match(pool, tokens(1, 2, 3, 4)) == [0, 1]
    assert pool.evictions == 2
    pool.free(fill(pool, tokens(5)))
    assert counts(pool) == (6, 2, 0)
    assert (match(pool, tokens(1, 2)), match(pool, tokens(5))) == ([0], [2])
    # Blocks beyond the limit are free like any other, those evicted last come first.
    assert pool.allocate(8) == [1, 3, 4, 5, 6, 7, 0, 2]


def test_without_a_cache_nothing_outlives_its_users() -> None:
    pool = BlockPool(4, BS, cache_blocks=0)
    table = fill(pool, tokens(1, 2))
    assert match(pool, tokens(1, 2)) == table
    pool.share(table[:1])
    pool.free(table)
    assert counts(pool) == (3, 0, 1)
    assert match(pool, tokens(1, 2)) == [0]
    pool.free(table[:1])
    assert counts(pool) == (4, 0, 0)
    assert match(pool, tokens(1, 2)) == []
    assert pool.evictions == 2


# Who may write


def test_a_block_may_be_written_by_its_only_user_until_it_is_offered() -> None:
    pool = BlockPool(2, BS)
    (block,) = pool.allocate(1) or []
    assert pool.writable(block)
    pool.share([block])
    assert not pool.writable(block)
    # One of the two is a copy that is made before anything is written.
    assert pool.writable(block, sources=1)
    pool.free([block])
    assert pool.writable(block)
    assert seal(pool, block, tokens(1), None) == block
    assert not pool.writable(block)
    pool.clear()
    assert pool.writable(block)


# Faults of our own


def test_freeing_twice_is_noticed() -> None:
    pool = BlockPool(2, BS)
    table = pool.allocate(1) or []
    pool.free(table)
    with pytest.raises(IntegrityError):
        pool.free(table)


def test_integrity_explains_every_reference() -> None:
    pool = BlockPool(4, BS)
    one, two = pool.allocate(2), pool.allocate(1)
    assert one is not None
    assert two is not None
    pool.check_integrity([one, two])
    for wrong in ([one], [one, two, two], [one, [3]]):
        with pytest.raises(IntegrityError):
            pool.check_integrity(wrong)


def test_a_free_block_cannot_be_shared() -> None:
    pool = BlockPool(2, BS)
    with pytest.raises(IntegrityError, match="is free"):
        pool.share([1])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda pool: pool._free.take(1, []), "lost or in two states"),
        (lambda pool: pool._free.add(0), "lost or in two states"),
        (lambda pool: pool._by_hash.popitem(), "index of hashes"),
        (lambda pool: pool._cached.move_to_end(1), "evicted before"),
        (lambda pool: setattr(pool._blocks[3], "tokens", (1, 2, 3, 4)), "no name"),
        (lambda pool: setattr(pool._blocks[1], "after", 3), "not offered"),
        (lambda pool: setattr(pool, "cache_blocks", 1), "at most 1 may be"),
    ],
)
def test_integrity_notices_what_contradicts_itself(fault: Callable[[BlockPool], object], message: str) -> None:
    pool = BlockPool(6, BS)
    pool.free(fill(pool, tokens(1, 2)))
    pool.allocate(2)
    pool.check_integrity()
    fault(pool)
    with pytest.raises(IntegrityError, match=message):
        pool.check_integrity()


def test_integrity_notices_a_used_block_whose_head_may_be_evicted() -> None:
    pool = BlockPool(4, BS)
    table = fill(pool, tokens(1, 2))
    pool.free(table[:1])
    with pytest.raises(IntegrityError, match="evicted before"):
        pool.check_integrity()


@pytest.mark.parametrize(("blocks", "size"), [(0, 4), (-1, 4), (4, 0)])
def test_a_pool_needs_a_block_of_a_token(blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match="at least 1 block"):
        BlockPool(blocks, size)


def test_the_limit_of_the_cache_is_no_negative_number() -> None:
    with pytest.raises(ValueError, match="cache_blocks is -1"):
        BlockPool(4, BS, cache_blocks=-1)


def test_a_run_has_a_block() -> None:
    with pytest.raises(ValueError, match="block_run is 0"):
        BlockPool(4, BS, block_run=0)
