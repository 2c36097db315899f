"""Routing decisions and the charges that make up for what Redis does not show yet."""

from __future__ import annotations

import random

from gateway.router import Candidate, Considered, Decision, Pending, route


def candidate(name: str, tokens: int = 0, state: str = "ready") -> Candidate:
    return Candidate(worker=name, incarnation=f"{name}-1", state=state, tokens=tokens)


def decide(
    *candidates: Candidate, pending: dict[str, int] | None = None, refused: dict[str, str] | None = None, seed: int = 0
) -> Decision:
    return route(candidates, pending=pending or {}, refused=refused or {}, rng=random.Random(seed))


def test_the_least_charged_worker_wins_and_all_reasons_are_kept() -> None:
    decision = decide(
        candidate("a", 300),
        candidate("b", 100),
        candidate("c", 0, "draining"),
        candidate("d"),
        refused={"d-1": "is gone"},
    )
    assert decision == Decision(
        chosen=Considered("b", "b-1", 100, "chosen"),
        considered=(
            Considered("a", "a-1", 300, "costlier"),
            Considered("b", "b-1", 100, "chosen"),
            Considered("c", "c-1", 0, "is draining"),
            Considered("d", "d-1", 0, "is gone"),
        ),
    )


def test_nobody_takes_jobs() -> None:
    assert decide() == Decision(None, ())
    assert decide(candidate("a", 0, "draining")).chosen is None
    assert decide(candidate("a"), refused={"a-1": "its queue is full"}).chosen is None


def test_charges_not_visible_yet_count() -> None:
    decision = decide(candidate("a", 100), candidate("b", 150), pending={"a-1": 51})
    assert decision.chosen == Considered("b", "b-1", 150, "chosen")


def test_charges_go_by_incarnation_so_a_restarted_worker_starts_empty() -> None:
    assert decide(candidate("a", 10), candidate("b", 20), pending={"a-0": 999}).chosen == Considered(
        "a", "a-1", 10, "chosen"
    )


def test_a_load_that_drifted_below_zero_is_no_magnet() -> None:
    assert {decide(candidate("a", -500), candidate("b", 0), seed=seed).chosen for seed in range(20)} == {
        Considered("a", "a-1", 0, "chosen"),
        Considered("b", "b-1", 0, "chosen"),
    }


def test_ties_are_broken_evenly_and_by_the_given_generator() -> None:
    workers = [candidate(name) for name in "abcd"]
    chosen = [decide(*workers, seed=seed).chosen for seed in range(400)]
    counts = {name: sum(each is not None and each.worker == name for each in chosen) for name in "abcd"}
    assert min(counts.values()) > 60
    assert chosen == [decide(*workers, seed=seed).chosen for seed in range(400)]
    assert [each.verdict for each in decide(*workers).considered].count("tied") == 3


def test_a_burst_does_not_herd_on_one_worker() -> None:
    """32 decisions over readings that all began before any charge was visible."""
    pending, rng = Pending(), random.Random(1)
    readings = [pending.begin_reading() for _ in range(32)]
    taken = []
    for reading in readings:
        decision = route([candidate("a"), candidate("b")], pending=pending.unseen_by(reading), refused={}, rng=rng)
        assert decision.chosen is not None
        pending.charge(decision.chosen.incarnation, 100)
        pending.end_reading(reading)
        taken.append(decision.chosen.worker)
    assert (taken.count("a"), taken.count("b")) == (16, 16)


def test_a_charge_counts_for_readings_that_began_before_it_was_settled() -> None:
    pending = Pending()
    early = pending.begin_reading()
    charge = pending.charge("a", 10)
    during = pending.begin_reading()
    pending.settle(charge, applied=True)
    late = pending.begin_reading()
    assert pending.unseen_by(early) == {"a": 10}
    assert pending.unseen_by(during) == {"a": 10}
    assert pending.unseen_by(late) == {}
    for reading in (early, during):
        pending.end_reading(reading)
    assert len(pending) == 0
    pending.end_reading(late)


def test_a_charge_that_was_declined_counts_for_nobody() -> None:
    pending = Pending()
    reading = pending.begin_reading()
    charge = pending.charge("a", 10)
    assert pending.unseen_by(reading) == {"a": 10}
    pending.settle(charge, applied=False)
    assert pending.unseen_by(reading) == {}
    pending.end_reading(reading)


def test_equal_charges_are_kept_apart() -> None:
    pending = Pending()
    reading = pending.begin_reading()
    first, second = pending.charge("a", 10), pending.charge("a", 10)
    pending.settle(first, applied=False)
    assert pending.unseen_by(reading) == {"a": 10}
    pending.settle(second, applied=True)
    pending.end_reading(reading)
    assert len(pending) == 0


def test_nothing_is_kept_when_nobody_reads() -> None:
    pending = Pending()
    pending.settle(pending.charge("a", 10), applied=True)
    assert len(pending) == 0
