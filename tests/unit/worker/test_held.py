"""The mirror of a pool's offers, and the net change that Redis gets."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from kvstore.block_hash import BlockHash, chain, root
from kvstore.prefix_index import HeldChange, short
from worker.held import Held
from worker.scheduling.block import Event, EventKind, IntegrityError
from worker.scheduling.block_pool import BlockPool

if TYPE_CHECKING:
    from collections.abc import Iterable

A, B, C, D = (BlockHash(letter * 32) for letter in (b"a", b"b", b"c", b"d"))
SHORT = {hash_: short(hash_) for hash_ in (A, B, C, D)}
CLEARED = Event(EventKind.CLEARED)


def stored(*hashes: BlockHash) -> list[Event]:
    return [Event(EventKind.STORED, hash_) for hash_ in hashes]


def evicted(*hashes: BlockHash) -> list[Event]:
    return [Event(EventKind.EVICTED, hash_) for hash_ in hashes]


def change(added: Iterable[BlockHash] = (), removed: Iterable[BlockHash] = ()) -> HeldChange:
    return HeldChange(tuple(SHORT[hash_] for hash_ in added), tuple(SHORT[hash_] for hash_ in removed))


def shown(*hashes: BlockHash) -> Held:
    """Redis has these."""
    held = Held()
    held.apply(stored(*hashes))
    held.take()
    held.settled(len(hashes))
    return held


def test_what_is_stored_and_evicted_goes_out_once_in_order() -> None:
    held = Held()
    assert not held.pending
    held.apply(stored(A, B, C))
    assert held.pending
    assert held.take() == change([A, B, C])
    assert not held.pending
    held.apply(evicted(C, B))
    held.settled(3)
    assert held.take() == change([], [C, B])
    held.settled(1)
    assert held.offered == {SHORT[A]}
    assert (held.pending, held.drifted, held.count) == (False, False, 1)


def test_what_was_taken_back_before_anybody_knew_is_no_change() -> None:
    held = shown(A)
    held.apply([*stored(B), *evicted(B), *evicted(A), *stored(A)])
    assert not held.pending
    held.apply([*stored(B), *evicted(B), *stored(B)])
    assert held.take() == change([B])
    # B is on its way: what follows is told in full.
    held.apply(evicted(B))
    held.settled(2)
    assert held.take() == change([], [B])


def test_a_cleared_pool_takes_back_what_redis_knows_children_first() -> None:
    held = shown(A, B, C)
    held.apply([*evicted(C), *stored(D), CLEARED, *stored(B)])
    assert held.take() == change([], [C, A])
    held.settled(1)
    assert held.offered == {SHORT[B]}
    assert not held.drifted


def test_a_change_is_taken_only_once_the_last_one_is_settled() -> None:
    held = Held()
    held.apply(stored(A))
    held.take()
    with pytest.raises(IntegrityError, match="in flight"):
        held.take()
    with pytest.raises(IntegrityError, match="in flight"):
        held.snapshot()


@pytest.mark.parametrize(("members", "drifted"), [(2, False), (0, True), (1, True), (3, True), (None, False)])
def test_a_commit_that_tells_another_number_shows_drift(members: int | None, drifted: bool) -> None:
    held = shown(A)
    held.apply(stored(B))
    held.take()
    held.apply(stored(C))  # not on its way yet
    held.settled(members)
    assert (held.drifted, held.drifts, held.pending) == (drifted, int(drifted), True)


@pytest.mark.parametrize(("members", "drifted"), [(1, False), (0, True), (2, True)])
def test_a_heartbeat_that_tells_another_number_shows_drift(members: int, drifted: bool) -> None:
    held = shown(A)
    held.apply(stored(B))  # not taken: Redis can't have it
    held.seen(held.look(), members)
    assert held.drifted is drifted


def test_a_heartbeat_beside_a_change_is_not_judged() -> None:
    held = shown(A)
    held.apply(stored(B))
    look = held.look()
    held.take()
    held.seen(look, 7)  # in flight
    held.settled(2)
    held.seen(look, 7)  # was in flight meanwhile
    assert not held.drifted
    held.apply(stored(C))
    held.take()
    look = held.look()
    held.settled(3)
    held.seen(look, 7)  # asked before it was settled
    assert not held.drifted
    held.seen(held.look(), 7)
    assert held.drifted


def test_an_audit_finds_members_that_numbers_hide() -> None:
    held = shown(A, B)
    held.begin_audit()
    held.audited({SHORT[A], SHORT[B]})
    assert not held.drifted
    held.begin_audit()
    held.audited({SHORT[A], SHORT[C]})
    assert held.drifted


def test_an_audit_does_not_judge_what_changes_meanwhile() -> None:
    held = shown(A, B)
    held.apply([*evicted(B), *stored(C)])
    held.begin_audit()
    held.take()
    held.settled(2)
    held.apply(stored(D))  # not taken: must not be there
    held.audited({SHORT[A], SHORT[B]})  # B and C may be there or not
    assert not held.drifted
    held.take()  # D, in flight as the next one begins
    held.begin_audit()
    held.audited({SHORT[A], SHORT[C]})
    assert not held.drifted
    held.settled(3)
    held.begin_audit()
    held.audited({SHORT[A], SHORT[C]})
    assert held.drifted


def test_drift_is_mended_by_a_snapshot_whatever_happens_beside_it() -> None:
    held = shown(A, B)
    held.seen(held.look(), 0)
    held.begin_audit()
    snapshot = held.snapshot()
    assert {*snapshot} == {SHORT[A], SHORT[B]}
    held.apply([*stored(C), *evicted(B)])  # while it is written
    held.replaced(snapshot)
    held.audited(set())  # what was read is from before
    assert (held.drifted, held.drifts) == (False, 1)
    assert held.take() == change([C], [B])
    held.settled(2)
    assert not held.drifted


def test_a_snapshot_has_what_was_waiting_to_go_out() -> None:
    held = shown(A)
    held.apply([*stored(B), *evicted(A)])
    held.seen(held.look(), 5)
    held.replaced(held.snapshot())
    assert not held.pending
    assert held.count == 1


class Redis:
    """A set, and accidents that may happen to it."""

    def __init__(self, rng: random.Random) -> None:
        self.members: set[bytes] = set()
        self._rng = rng

    def write(self, change: HeldChange) -> int:
        for _ in range(self._rng.choice((1, 1, 2))):  # repeated after a lost reply
            self.members |= {*change.added}
            self.members -= {*change.removed}
        return len(self.members)

    def accident(self) -> None:
        if self._rng.random() < 0.5:
            self.members.clear()
        elif self.members:
            self.members.remove(self._rng.choice(sorted(self.members)))


@pytest.mark.parametrize("seed", range(20))
def test_redis_follows_a_pool_through_everything(seed: int) -> None:
    rng = random.Random(seed)
    pool, held, redis = BlockPool(12, 1, cache_blocks=8), Held(), Redis(rng)
    start = root("model", 1)
    tables: list[list[int]] = []
    for turn in range(400):
        choice = rng.random()
        if choice < 0.5:
            tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 5))]
            blocks = pool.allocate(len(tokens))
            if blocks is not None:
                tables.append(blocks)
                after: int | None = None
                for block, hash_, token in zip(blocks, chain(start, tokens, 1), tokens, strict=True):
                    offered = pool.seal(block, hash_, (token,), after=after, root=start)
                    if offered != block:
                        break  # another holds it
                    after = block
        elif choice < 0.9 and tables:
            pool.free(tables.pop(rng.randrange(len(tables))))
        elif choice < 0.95 and tables:
            pool.forget(rng.choice(tables)[:1])
        elif choice > 0.98:
            pool.clear()
        held.apply(pool.take_events())
        assert held.offered == {short(hash_) for hash_ in pool._by_hash}
        if rng.random() < 0.4:
            written = redis.write(held.take())
            if rng.random() < 0.3:
                redis.accident()
                written = len(redis.members)
            held.settled(written)
        if rng.random() < 0.1:
            held.begin_audit()
            held.audited(set(redis.members))
        if held.drifted:
            snapshot = held.snapshot()
            redis.members = {*snapshot}
            held.replaced(snapshot)
        if turn % 50 == 49:
            held.settled(redis.write(held.take()))
            assert not held.drifted
            assert redis.members == {short(hash_) for hash_ in pool._by_hash}
