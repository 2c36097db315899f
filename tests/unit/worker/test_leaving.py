"""How long a worker that leaves stays."""

from __future__ import annotations

from worker.leaving import MARGIN_S, Leaving


def test_nobody_leaves_who_was_not_told_to() -> None:
    leaving = Leaving(0.0)
    assert (leaving.begun, leaving.time_is_up(1e9), leaving.overdue(1e9)) == (False, False, False)


def test_the_rest_of_the_grace_time_may_be_given_up() -> None:
    leaving = Leaving(10.0)
    leaving.hurry(99.0)
    assert not leaving.begun
    leaving.begin(100.0)
    assert not leaving.time_is_up(101.0)
    leaving.hurry(101.0)
    leaving.hurry(105.0)
    assert (leaving.time_is_up(101.0), leaving.overdue(101.1 + MARGIN_S)) == (True, True)


def test_the_grace_time_runs_from_the_first_word() -> None:
    leaving = Leaving(10.0)
    assert leaving.begin(100.0)
    assert not leaving.begin(109.0)
    assert leaving.begun
    assert [leaving.time_is_up(now) for now in (100.0, 109.9, 110.0, 120.0)] == [False, False, True, True]
    assert [leaving.overdue(now) for now in (110.0, 110.0 + MARGIN_S, 110.1 + MARGIN_S)] == [False, False, True]
