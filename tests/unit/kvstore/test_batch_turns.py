"""Whose batch is next."""

from __future__ import annotations

from kvstore.batch_turns import Waiting, next_up

A1, A2, A3 = (Waiting(f"a{each}", "acme", 100 + each) for each in (1, 2, 3))
B1, B2 = (Waiting(f"b{each}", "other", 200 + each) for each in (1, 2))
NOBODY = Waiting("n", "", 300)


def test_of_one_tenant_the_oldest_goes_first() -> None:
    assert next_up([A3, A1, A2], {"acme": 5}) == "a1"
    assert next_up([], {"acme": 5}) is None


def test_who_had_no_turn_goes_before_who_had_one() -> None:
    assert next_up([A1, A2, B1], {"acme": 5}) == "b1"
    assert next_up([A1, B1, NOBODY], {"acme": 5, "other": 4}) == "n"


def test_a_tenant_with_many_batches_has_no_more_turns_than_one_with_few() -> None:
    turns: dict[str, float] = {}
    waiting = {each.id: each for each in (A1, A2, A3, B1, B2, NOBODY)}
    had = []
    for now in range(1, 10):
        first = next_up(waiting.values(), turns)
        assert first is not None
        had.append(first)
        turns[waiting[first].tenant] = now
        if now == 6:
            del waiting["b1"]
    assert had == ["a1", "b1", "n", "a1", "b1", "n", "a1", "b2", "n"]
