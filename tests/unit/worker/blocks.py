"""Short ways to fill a pool in tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.block_hash import BlockHash, chain, root

if TYPE_CHECKING:
    from worker.scheduling.block_pool import BlockPool

BS = 4
ROOT = root("model", BS)


def tokens(*blocks: int) -> list[int]:
    """Block ``n`` holds the tokens 10n, 10n + 1, ..."""
    return [10 * block + slot for block in blocks for slot in range(BS)]


def hashes(token_ids: list[int], under: BlockHash = ROOT) -> list[BlockHash]:
    return chain(under, token_ids, BS)


def fill(pool: BlockPool, token_ids: list[int], under: BlockHash = ROOT) -> list[int]:
    """A table with the tokens' full blocks, computed and sealed as after a step."""
    table = pool.allocate(len(token_ids) // BS)
    assert table is not None
    for index, block in enumerate(table):
        assert seal(pool, block, token_ids[: (index + 1) * BS], table[index - 1] if index else None, under) == block
    return table


def grow(pool: BlockPool, head: list[int], token_ids: list[int]) -> list[int]:
    """The table of a second sequence: ``head`` is shared, the last block of the tokens computed and sealed."""
    pool.share(head)
    (tail,) = pool.allocate(1) or []
    assert seal(pool, tail, token_ids, head[-1] if head else None) == tail
    return [*head, tail]


def seal(pool: BlockPool, block: int, token_ids: list[int], after: int | None, under: BlockHash = ROOT) -> int | None:
    """Seal a block that holds the last full block of the tokens."""
    return pool.seal(block, hashes(token_ids, under)[-1], tuple(token_ids[-BS:]), after=after, root=under)


def match(pool: BlockPool, token_ids: list[int], under: BlockHash = ROOT) -> list[int]:
    return pool.match(under, hashes(token_ids, under), token_ids)


def counts(pool: BlockPool) -> tuple[int, int, int]:
    pool.check_integrity()
    return pool.free_count, pool.cached_count, pool.used_count
