"""A pool that hands out neighbours: exact block ids, fragmentation, and claims that keep nothing from anybody."""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from tests.unit.worker.blocks import BS, counts, fill, match, seal, tokens
from tests.unit.worker.scheduling import add, make, step
from worker.scheduling.block_pool import BlockPool

if TYPE_CHECKING:
    from types import FrameType

    from _typeshed import TraceFunction

    from worker.sequence import Sequence


class Tables:
    """Tables that grow in turn, by name."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.of: dict[str, list[int]] = {}

    def grow(self, names: str, count: int = 1) -> list[list[int]]:
        """Each gets ``count`` blocks more. Returns what they got."""
        grown = []
        for name in names:
            table = self.of.setdefault(name, [])
            blocks = self.pool.allocate(count, table)
            assert blocks is not None
            table += blocks
            grown.append(blocks)
        self.pool.check_integrity(self.of.values())
        return grown

    def end(self, names: str) -> None:
        for name in names:
            self.pool.free(self.of.pop(name))
        self.pool.check_integrity(self.of.values())


def pool_of(num_blocks: int, block_run: int = 8, cache_blocks: int | None = None) -> BlockPool:
    return BlockPool(num_blocks, BS, cache_blocks, block_run)


def runs(table: list[int]) -> list[int]:
    """Lengths of a table's rows of neighbours."""
    lengths = [1]
    for before, block in pairwise(table):
        if block == before + 1:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths


def test_runs_grow_with_the_sequences() -> None:
    """Two that grow in turn: 1, 2, 4, 8 blocks that are neighbours, and then no more than 8."""
    tables = Tables(pool_of(100))
    for _ in range(31):
        tables.grow("ab")
    assert tables.of["a"][:7] == [0, 2, 3, 6, 7, 8, 9]
    assert tables.of["b"][:7] == [1, 4, 5, 10, 11, 12, 13]
    assert runs(tables.of["a"]) == runs(tables.of["b"]) == [1, 2, 4, 8, 8, 8]


def test_a_prompt_is_one_run_however_long_and_its_chunks_follow_each_other() -> None:
    tables = Tables(pool_of(100))
    assert tables.grow("a", 20) == [[*range(20)]]
    assert tables.grow("a", 20) == [[*range(20, 40)]]
    assert tables.grow("b", 3) == [[40, 41, 42]]
    assert tables.grow("a") == [[43]]
    assert tables.grow("b") == [[51]]
    assert tables.grow("ab") == [[44], [52]]


def test_a_run_goes_where_it_fits_closely() -> None:
    """What is left between others, and the long stretches stay for who needs them."""
    tables = Tables(pool_of(30))
    tables.grow("abcdefg", 4)
    tables.end("be")
    assert tables.grow("h", 3) == [[16, 17, 18]]
    assert tables.grow("i", 2) == [[28, 29]]
    assert tables.grow("j", 4) == [[4, 5, 6, 7]]
    assert tables.grow("h") == [[19]]
    assert tables.pool.allocate(1) is None


def test_without_a_stretch_that_is_long_enough_the_longest_come_first() -> None:
    tables = Tables(pool_of(12, block_run=16))
    tables.grow("abcdef", 2)
    tables.end("bc")
    tables.end("e")
    assert tables.grow("g", 6) == [[2, 3, 4, 5, 8, 9]]


def test_what_comes_back_is_joined_with_what_is_beside_it() -> None:
    tables = Tables(pool_of(8))
    tables.grow("abcdefgh")
    for name in "bdcag":
        tables.end(name)
    assert tables.grow("i", 4) == [[0, 1, 2, 3]]
    tables.end("h")
    assert tables.grow("j", 2) == [[6, 7]]


# Claims


def test_a_claim_keeps_nothing_from_anybody() -> None:
    """a holds 4 blocks and has a claim to what follows them; still others get every block that there is."""
    tables = Tables(pool_of(12))
    tables.grow("a", 4)
    tables.grow("b")
    assert tables.grow("a") == [[5]]
    assert counts(tables.pool) == (6, 0, 6)
    assert tables.grow("c", 2) == [[10, 11]]  # not 6 to 9
    assert tables.grow("d", 4) == [[6, 7, 8, 9]]
    assert tables.pool.allocate(1) is None


def test_the_oldest_claim_goes_first() -> None:
    tables = Tables(pool_of(16))
    tables.grow("ab", 3)
    tables.grow("ab")
    assert tables.of == {"a": [0, 1, 2, 6], "b": [3, 4, 5, 10]}
    tables.grow("c", 2)
    assert tables.of["c"] == [14, 15]
    assert tables.grow("d") == [[7]]
    assert tables.grow("b") == [[11]]
    assert tables.grow("a") == [[8]]


def test_a_claim_ends_with_the_one_who_has_it() -> None:
    tables = Tables(pool_of(16))
    tables.grow("ab", 2)
    tables.grow("ab")
    assert tables.of == {"a": [0, 1, 4], "b": [2, 3, 7]}
    tables.end("a")
    assert tables.grow("cd", 2) == [[0, 1], [4, 5]]
    assert tables.grow("d") == [[6]]


def test_a_claim_ends_when_the_block_before_it_is_only_cached() -> None:
    pool = pool_of(16)
    table = fill(pool, tokens(1))
    table += pool.allocate(1, table) or []
    assert table == [0, 1]
    assert seal(pool, 1, tokens(1, 2), after=0) == 1
    pool.share(table)
    pool.free(table)
    assert pool.allocate(1) == [3]
    pool.free(table)
    assert counts(pool) == (13, 2, 1)
    assert pool.allocate(1) == [2]


def test_who_shares_a_last_block_goes_elsewhere_if_another_was_first() -> None:
    pool = pool_of(16)
    table = [*(pool.allocate(1) or []), *(pool.allocate(1, [0]) or [])]
    assert table == [0, 1]
    pool.share(table)
    assert pool.allocate(1, table) == [2]
    assert pool.allocate(1, table) == [3]
    assert pool.allocate(1, [*table, 3]) == [4]
    assert pool.allocate(1, [*table, 2]) == [6]


# Eviction


def test_free_blocks_go_before_any_is_evicted_claimed_or_not() -> None:
    pool = pool_of(9)
    pool.free(fill(pool, tokens(1, 2, 3, 4)))
    table = pool.allocate(2) or []
    table += pool.allocate(1, table) or []
    assert table == [4, 5, 6]
    assert pool.allocate(2) == [7, 8]
    assert pool.evictions == 0
    # They are evicted as ever, the tail first, and used as neighbours.
    assert pool.allocate(3) == [1, 2, 3]
    assert match(pool, tokens(1, 2, 3, 4)) == [0]


def test_what_was_evicted_beyond_the_caches_limit_is_joined_too() -> None:
    pool = pool_of(8, cache_blocks=1)
    pool.free(fill(pool, tokens(1, 2, 3)))
    assert counts(pool) == (7, 1, 0)
    assert pool.allocate(7) == [1, 2, 3, 4, 5, 6, 7]


def test_after_a_clear_all_is_one_stretch_again() -> None:
    pool = pool_of(8)
    for number in (1, 2, 3, 4):
        pool.free(fill(pool, tokens(number, 9)))
    pool.clear()
    assert pool.allocate(8) == [*range(8)]


# Under load


def test_streams_beside_each_other_keep_to_their_runs() -> None:
    """Four texts of 8 blocks each grow to 40, block by block in turn, in a pool of 256."""
    scheduler = make(256, token_budget=128, block_run=16)
    streams = [add(scheduler, name, 8 * BS) for name in "abcd"]
    while min(one.num_tokens for one in streams) < 40 * BS:
        step(scheduler)
    fixed = make(256, token_budget=128)
    others = [add(fixed, name, 8 * BS) for name in "abcd"]
    while min(one.num_tokens for one in others) < 40 * BS:
        step(fixed)
    assert [most_cuts(streams), most_cuts(others)] == [3, 32]


def most_cuts(sequences: list[Sequence]) -> int:
    return max(len(runs(sequence.block_table)) - 1 for sequence in sequences)


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_comings_and_goings(seed: int) -> None:
    """All is handed out that there is, nothing twice, and the books hold all the time."""
    rng = random.Random(seed)
    tables = Tables(pool_of(rng.choice([1, 2, 7, 64, 200]), block_run=rng.choice([2, 3, 16, 500])))
    for number in range(300):
        name = chr(33 + number)
        available = tables.pool.available
        if available and rng.random() < 0.6:
            count = min(available, rng.choice([1, 1, 1, 2, 5, 30]))
            tables.grow(rng.choice([name, *tables.of]), count)
            assert tables.pool.available == available - count
        elif tables.of:
            tables.end(rng.choice([*tables.of]))
    tables.end("".join(tables.of))
    assert tables.pool.allocate(tables.pool.total) == [*range(tables.pool.total)]


def test_a_large_pool_in_pieces_costs_no_more_than_a_small_one() -> None:
    """Every second block is free; each is found in the same few lines of code, whatever their number."""
    assert lines_of(40_000) < 1.5 * lines_of(1000)


def lines_of(num_blocks: int) -> int:
    """Lines that it takes to allocate 500 blocks that lie apart."""
    pool = pool_of(num_blocks)
    table = pool.allocate(num_blocks) or []
    pool.free(table[::2])
    lines = 0

    def count(frame: FrameType, event: str, _: object) -> TraceFunction:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        taken = pool.allocate(500)
    finally:
        sys.settrace(before)
    assert len(taken or []) == 500
    return lines


# Faults of our own
