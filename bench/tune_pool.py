"""Block tables as a real pool gives them out: a new one, one that has been at work, or one in pieces on purpose."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from kvstore.block_hash import BlockHash
from worker.scheduling.block_pool import BlockPool

if TYPE_CHECKING:
    from collections.abc import Sequence

FRESH: Final = "fresh"
"""Nothing was ever in it."""
WORN: Final = "worn"
"""Texts of all lengths have come and gone, as in a worker after its first minutes: the cache is full, and each block
that is taken is evicted first."""
PIECES: Final = "pieces"
"""Blocks in random order: what no pool does, and the worst that could be."""

CHUNK_TOKENS: Final = 256
"""Of a prompt in one step."""
GUESTS: Final = 24
"""Texts at once, of those that wear a pool."""

_ROOT: Final = BlockHash(bytes(32))


def tables(
    state: str, *, num_blocks: int, block_size: int, block_run: int, sequences: int, context: int, seed: int
) -> list[list[int]]:
    """The tables of so many sequences of ``context`` tokens each: half of it a prompt, the rest come token by token."""
    needed = -(-context // block_size)
    if state == PIECES:
        order = random.Random(f"{seed}/{state}").sample(range(num_blocks), sequences * needed)
        return [order[index::sequences] for index in range(sequences)]
    pool = BlockPool(num_blocks, block_size, block_run=block_run)
    if state == WORN:
        wear(pool, seed)
    made: list[list[int]] = [[] for _ in range(sequences)]
    chunk = max(1, CHUNK_TOKENS // block_size)
    for table in made:
        while len(table) < needed // 2:
            _grow(pool, table, min(chunk, needed // 2 - len(table)))
    for _ in range(needed - needed // 2):
        for table in made:
            _grow(pool, table, 1)
    return made


def wear(pool: BlockPool, seed: int) -> None:
    """Let texts of all lengths come, grow beside each other and go, until each block has been used twice on average.

    Afterwards nobody uses any, and what was full stays cached.
    """
    numbers = random.Random(f"{seed}/worn")
    longest = max(1, pool.total // GUESTS)
    guests: list[tuple[list[int], int]] = []
    taken = named = 0
    while taken < 2 * pool.total:
        while len(guests) < GUESTS:
            length = int(numbers.lognormvariate(5.7, 0.8)) // pool.block_size + 1
            guests.append(([], min(length, longest)))
        staying = []
        for table, length in guests:
            # A third of it is the prompt.
            count = min(pool.available, 1 if table else max(1, length // 3))
            _grow(pool, table, count)
            taken += count
            if len(table) < length and pool.available:
                staying.append((table, length))
            else:
                named = _leave(pool, table, named)
        guests = staying
    for table, _ in guests:
        named = _leave(pool, table, named)


def neighbours(tables: Sequence[Sequence[int]]) -> tuple[int, int]:
    """How many blocks lie right behind the one before them in their table, and how many could."""
    behind = sum(block == before + 1 for table in tables for before, block in pairwise(table))
    return behind, sum(len(table) - 1 for table in tables)


def _grow(pool: BlockPool, table: list[int], count: int) -> None:
    blocks = pool.allocate(count, table)
    if blocks is None:
        raise ValueError(f"a pool of {pool.total} blocks is too small")
    table += blocks


def _leave(pool: BlockPool, table: list[int], named: int) -> int:
    """Offer all but the last block, which isn't full, and free the table. Returns how many were ever offered."""
    after = None
    for block in table[:-1]:
        named += 1
        tokens = (named,) * pool.block_size
        pool.seal(block, BlockHash(named.to_bytes(32, "big")), tokens, after=after, root=_ROOT)
        after = block
    pool.free(table)
    return named
