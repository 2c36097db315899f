"""What pages in the store continue: when it is renewed, and what of it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.block_hash import BlockHash
from kvstore.page_store import PageRef
from tests.unit.worker.page_store import names
from worker import heads
from worker.heads import AHEAD_RANKS, AHEAD_S, Heads

if TYPE_CHECKING:
    import pytest

A, B, C = (name.hash for name in names(1, 2, 3))


def refs(*places: tuple[BlockHash, int]) -> list[PageRef]:
    return [PageRef(hash_, position - AHEAD_RANKS) for hash_, position in places]


def test_each_is_renewed_once_in_a_while_whatever_continues_it() -> None:
    known = Heads()
    known.continued([(A, B), (A, B, C)], now=10.0)
    taken = known.take(9)
    assert taken == refs((A, 0), (B, 1), (C, 2))
    assert not known
    known.renewed(taken, [True, True, True], asked=10.0)
    known.continued([(A, B, C)], now=10.0 + AHEAD_S - 0.1)
    assert not known
    known.continued([(A, B)], now=10.0 + AHEAD_S)
    assert known.take(9) == refs((A, 0), (B, 1))
    assert known.lacking(9) == []


def test_what_is_lacking_is_asked_for_once_from_the_head_on() -> None:
    known = Heads()
    known.continued([(A, B, C)], now=0.0)
    known.renewed(known.take(9), [False, True, False], asked=0.0)
    assert known.lacking(0) == []
    assert known.lacking(-1) == []
    assert known.lacking(1) == [(A, 0)]
    assert known.lacking(9) == [(C, 2)]
    assert known.lacking(9) == []
    known.continued([(A, B, C)], now=1.0)
    assert not known, "it is on its way"


def test_a_store_that_can_not_be_asked_is_asked_again() -> None:
    known = Heads()
    known.continued([(A, B)], now=0.0)
    known.failed(known.take(1))
    assert known.take(9) == refs((B, 1), (A, 0))


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "MOST", 3)
    known, many = Heads(), [BlockHash(bytes([number]) * 32) for number in range(9)]
    known.continued([many], now=0.0)
    first = known.take(9)
    known.continued([many[5:]], now=0.0)
    known.failed(first)
    second = known.take(9)
    assert (first, second) == (
        refs(*((many[n], n) for n in range(3))),
        refs(*((many[n + 5], n) for n in range(3))),
    )
    for taken in (first, second):
        known.renewed(taken, [False] * 3, asked=0.0)
    assert known.lacking(9) == [(many[n], n) for n in range(3)]
    known.continued([many[:3], many[5:8]], now=0.0)
    assert known.take(9) == first, "the oldest are forgotten"
