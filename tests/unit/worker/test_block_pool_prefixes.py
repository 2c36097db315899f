"""The prefixes that a pool offers: what is a hit, what may be offered, what is told of it."""

from __future__ import annotations

import pytest

from kvstore.block_hash import root
from tests.unit.worker.blocks import BS, ROOT, counts, fill, grow, hashes, match, seal, tokens
from worker.scheduling.block import Event, EventKind, IntegrityError
from worker.scheduling.block_pool import BlockPool


def test_a_sealed_block_stays_hittable_after_it_was_freed() -> None:
    pool = BlockPool(4, BS)
    table = fill(pool, tokens(1, 2))
    pool.free(table)
    assert counts(pool) == (2, 2, 0)
    assert match(pool, tokens(1, 2, 3)) == table == [0, 1]
    assert match(pool, tokens(1, 9)) == [0]
    assert match(pool, tokens(9, 2)) == []


def test_an_evicted_block_can_no_longer_be_hit() -> None:
    pool = BlockPool(1, BS)
    pool.free(fill(pool, tokens(1)))
    assert pool.allocate(1) == [0]
    assert match(pool, tokens(1)) == []


def test_what_continues_a_forgotten_block_is_forgotten_too() -> None:
    pool = BlockPool(6, BS)
    table = fill(pool, tokens(1, 2, 3))
    other = grow(pool, table[:1], tokens(1, 4))
    pool.forget([table[1]])
    assert match(pool, tokens(1, 2, 3)) == [0]
    assert match(pool, tokens(1, 4)) == other == [0, 3]
    pool.free(table)
    pool.free(other)
    assert counts(pool) == (4, 2, 0)
    pool.forget([0])
    assert counts(pool) == (6, 0, 0)


def test_what_is_forgotten_is_free_at_once_when_nobody_uses_it() -> None:
    pool = BlockPool(2, BS)
    table = fill(pool, tokens(1, 2))
    pool.free(table)
    pool.forget(table)
    assert counts(pool) == (2, 0, 0)
    assert match(pool, tokens(1, 2)) == []
    assert pool.evictions == 0


def test_forgetting_what_is_not_offered_changes_nothing() -> None:
    pool = BlockPool(3, BS)
    table = fill(pool, tokens(1))
    (private,) = pool.allocate(1) or []
    pool.forget([private, 2])
    assert match(pool, tokens(1)) == table
    assert counts(pool) == (1, 0, 2)


def test_after_a_clear_nothing_is_offered_and_users_keep_their_blocks() -> None:
    pool = BlockPool(5, BS)
    cached, used = fill(pool, tokens(1, 2)), fill(pool, tokens(3))
    pool.free(cached)
    pool.clear()
    assert counts(pool) == (4, 0, 1)
    assert (match(pool, tokens(1, 2)), match(pool, tokens(3))) == ([], [])
    assert pool.writable(used[0])
    pool.free(used)
    assert counts(pool) == (5, 0, 0)
    # It starts anew.
    assert fill(pool, tokens(3)) == used


def test_a_second_block_with_the_same_content_gives_way_to_the_first() -> None:
    pool = BlockPool(3, BS)
    fill(pool, tokens(1))
    (copy,) = pool.allocate(1) or []
    assert seal(pool, copy, tokens(1), None) == 0
    assert pool.hash_of(copy) is None
    assert match(pool, tokens(1)) == [0]
    pool.free([copy])
    assert counts(pool) == (2, 0, 1)


def test_only_what_continues_an_offered_block_can_be_offered() -> None:
    pool = BlockPool(3, BS)
    head, tail = pool.allocate(2) or []
    assert seal(pool, tail, tokens(1, 2), head) is None
    assert seal(pool, head, tokens(1), None) == head
    assert seal(pool, tail, tokens(1, 2), head) == tail
    (end,) = pool.allocate(1) or []
    pool.forget([head])
    assert seal(pool, end, tokens(1, 2, 3), tail) is None
    assert counts(pool) == (0, 0, 3)


# F07
def test_a_block_whose_hash_names_another_prefix_is_not_offered() -> None:
    pool = BlockPool(4, BS)
    one, two = fill(pool, tokens(1)), fill(pool, tokens(2))
    (other,) = pool.allocate(1) or []
    hash_ = hashes(tokens(1))[0]
    assert pool.seal(other, hash_, tuple(tokens(9)), after=None, root=ROOT) is None
    assert pool.seal(other, hash_, tuple(tokens(1)), after=None, root=root("other model", BS)) is None
    assert pool.seal(other, hash_, tuple(tokens(1)), after=two[0], root=ROOT) is None
    assert pool.seal(other, hash_, tuple(tokens(1)), after=None, root=ROOT) == one[0]


def test_roots_keep_prefixes_apart() -> None:
    pool = BlockPool(2, BS)
    fill(pool, tokens(1))
    assert match(pool, tokens(1), root("model", BS, "salt")) == []
    assert match(pool, tokens(1), root("other model", BS)) == []


# F07
def test_a_hash_that_collides_is_no_hit_for_other_tokens() -> None:
    pool = BlockPool(2, BS)
    fill(pool, tokens(1))
    same_hash = hashes(tokens(1))
    assert pool.match(ROOT, same_hash, tokens(2)) == []


# F07
def test_a_hash_that_collides_is_no_hit_under_another_parent() -> None:
    pool = BlockPool(4, BS)
    one = fill(pool, tokens(1, 3))
    two = fill(pool, tokens(2))
    colliding = [hashes(tokens(2))[0], hashes(tokens(1, 3))[1]]
    assert pool.match(ROOT, colliding, tokens(2, 3)) == two
    assert one == [0, 1]


def test_only_a_used_full_block_that_is_not_offered_can_be_sealed() -> None:
    pool = BlockPool(2, BS)
    with pytest.raises(IntegrityError):
        seal(pool, 0, tokens(1), None)
    fill(pool, tokens(1))
    with pytest.raises(IntegrityError):
        seal(pool, 0, tokens(2), None)
    (other,) = pool.allocate(1) or []
    with pytest.raises(IntegrityError):
        pool.seal(other, hashes(tokens(2))[0], (1, 2, 3), after=None, root=ROOT)


# Events


def stored(*token_ids: list[int]) -> list[Event]:
    return [Event(EventKind.STORED, hashes(each)[-1]) for each in token_ids]


def evicted(*token_ids: list[int]) -> list[Event]:
    return [Event(EventKind.EVICTED, hashes(each)[-1]) for each in token_ids]


def test_events_tell_what_is_offered_in_order_and_once() -> None:
    pool = BlockPool(3, BS, cache_blocks=2)
    table = fill(pool, tokens(1, 2, 3))
    assert pool.stored == 3
    assert [*pool.take_events()] == stored(tokens(1), tokens(1, 2), tokens(1, 2, 3))
    assert pool.take_events() == ()
    pool.free(table)
    assert [*pool.take_events()] == evicted(tokens(1, 2, 3))
    assert pool.allocate(2) == [2, 1]
    assert [*pool.take_events()] == evicted(tokens(1, 2))
    pool.free([1])
    assert pool.take_events() == ()
    pool.clear()
    assert pool.take_events() == (Event(EventKind.CLEARED),)


def test_forgotten_prefixes_are_told_ends_first() -> None:
    """So that those who follow the events never have an end without its head."""
    pool = BlockPool(4, BS)
    table = fill(pool, tokens(1, 2, 3))
    grow(pool, table[:1], tokens(1, 4))
    pool.take_events()
    pool.forget(table)
    assert [*pool.take_events()] == evicted(tokens(1, 4), tokens(1, 2, 3), tokens(1, 2), tokens(1))


def test_a_second_block_with_the_same_content_is_no_event() -> None:
    pool = BlockPool(2, BS)
    fill(pool, tokens(1))
    pool.take_events()
    (copy,) = pool.allocate(1) or []
    assert seal(pool, copy, tokens(1), None) == 0
    assert pool.take_events() == ()
    assert pool.stored == 1
