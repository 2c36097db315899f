"""The block pool: exact block ids, exact eviction order, books that balance."""

from __future__ import annotations

import pytest

from kvstore.block_hash import BlockHash, chain, root
from worker.block_pool import BlockPool, IntegrityError

BS = 4
ROOT = root("model", BS)


def tokens(*blocks: int) -> list[int]:
    """Block ``n`` holds the tokens 10n, 10n + 1, ..."""
    return [10 * block + slot for block in blocks for slot in range(BS)]


def hashes(token_ids: list[int], under: BlockHash = ROOT) -> list[BlockHash]:
    return chain(under, token_ids, BS)


def fill(pool: BlockPool, token_ids: list[int], under: BlockHash = ROOT) -> list[int]:
    """A table with the tokens' full blocks, computed and sealed as after a step."""
    named = hashes(token_ids, under)
    table = pool.allocate(len(named))
    assert table is not None
    for index, (block, parent, hash_) in enumerate(zip(table, [under, *named], named, strict=False)):
        assert pool.seal(block, parent, hash_, tuple(token_ids[index * BS : (index + 1) * BS]))
    return table


def match(pool: BlockPool, token_ids: list[int], under: BlockHash = ROOT) -> list[int]:
    return pool.match(under, hashes(token_ids, under), token_ids)


def counts(pool: BlockPool) -> tuple[int, int, int]:
    pool.check_integrity()
    return pool.free_count, pool.cached_count, pool.used_count


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


def test_a_sealed_block_stays_hittable_after_it_was_freed() -> None:
    pool = BlockPool(4, BS)
    table = fill(pool, tokens(1, 2))
    pool.free(table)
    assert counts(pool) == (2, 2, 0)
    assert match(pool, tokens(1, 2, 3)) == table == [0, 1]
    assert match(pool, tokens(1, 9)) == [0]
    assert match(pool, tokens(9, 2)) == []


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
    assert pool.in_use(0)
    assert counts(pool) == (2, 0, 1)
    pool.free(table)
    assert not pool.in_use(0)
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
    second = match(pool, tokens(1, 3))
    pool.share(second)
    tail = pool.allocate(1)
    assert tail is not None
    named = hashes(tokens(1, 3))
    assert pool.seal(tail[0], named[0], named[1], tuple(tokens(3)))
    pool.free(second + tail)
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


def test_an_evicted_block_can_no_longer_be_hit() -> None:
    pool = BlockPool(1, BS)
    pool.free(fill(pool, tokens(1)))
    assert pool.allocate(1) == [0]
    assert match(pool, tokens(1)) == []


def test_a_prefix_ends_at_its_first_hole() -> None:
    pool = BlockPool(3, BS)
    table = fill(pool, tokens(1, 2, 3))
    pool.forget([table[1]])
    assert match(pool, tokens(1, 2, 3)) == [0]
    pool.free(table)
    assert counts(pool) == (1, 2, 0)


def test_what_is_forgotten_is_free_at_once_when_nobody_uses_it() -> None:
    pool = BlockPool(2, BS)
    table = fill(pool, tokens(1, 2))
    pool.free(table)
    pool.forget(table)
    assert counts(pool) == (2, 0, 0)
    assert match(pool, tokens(1, 2)) == []
    assert pool.evictions == 0


def test_the_second_block_with_the_same_content_stays_private() -> None:
    pool = BlockPool(3, BS)
    fill(pool, tokens(1))
    (copy,) = pool.allocate(1) or []
    assert not pool.seal(copy, ROOT, hashes(tokens(1))[0], tuple(tokens(1)))
    assert match(pool, tokens(1)) == [0]
    pool.free([copy])
    assert counts(pool) == (2, 0, 1)


def test_roots_keep_prefixes_apart() -> None:
    pool = BlockPool(2, BS)
    fill(pool, tokens(1))
    assert match(pool, tokens(1), root("model", BS, "salt")) == []
    assert match(pool, tokens(1), root("other model", BS)) == []


def test_a_hash_that_collides_is_no_hit_for_other_tokens() -> None:
    pool = BlockPool(2, BS)
    fill(pool, tokens(1))
    same_hash = hashes(tokens(1))
    assert pool.match(ROOT, same_hash, tokens(2)) == []


def test_a_hash_that_collides_is_no_hit_under_another_parent() -> None:
    pool = BlockPool(4, BS)
    one = fill(pool, tokens(1, 3))
    two = fill(pool, tokens(2))
    colliding = [hashes(tokens(2))[0], hashes(tokens(1, 3))[1]]
    assert pool.match(ROOT, colliding, tokens(2, 3)) == two
    assert one == [0, 1]


def test_only_a_used_full_unsealed_block_can_be_sealed() -> None:
    pool = BlockPool(2, BS)
    name = hashes(tokens(1))[0]
    with pytest.raises(IntegrityError):
        pool.seal(0, ROOT, name, tuple(tokens(1)))
    fill(pool, tokens(1))
    with pytest.raises(IntegrityError):
        pool.seal(0, ROOT, hashes(tokens(2))[0], tuple(tokens(2)))
    (other,) = pool.allocate(1) or []
    with pytest.raises(IntegrityError):
        pool.seal(other, ROOT, hashes(tokens(2))[0], (1, 2, 3))


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


@pytest.mark.parametrize(("blocks", "size"), [(0, 4), (-1, 4), (4, 0)])
def test_a_pool_needs_a_block_of_a_token(blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match="at least 1 block"):
        BlockPool(blocks, size)
