"""What `octavo top` makes of two looks at a fleet: rates by counters and the broker's time, sums, and what is gone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from octavo.v1.fleet_pb2 import LedgerResponse, Queue, Worker
from ops.answer import plain
from ops.top_figures import Beats, Figures, Snapshot, follow, view

LEDGER = plain(LedgerResponse(accepted=10, finished=6, failed=1, in_flight=3))


def worker(name: str = "w0", incarnation: str = "i", *, at: float, **told: Any) -> dict[str, Any]:
    """A worker whose last heartbeat was at that second."""
    fixed = {"state": "ready", "model": "m", "running": 2, "waiting": 1, "max_running": 8, "heartbeat_age_ms": 250}
    blocks = {"blocks_used": 5, "blocks_cached": 3, "blocks_free": 2}
    return plain(
        Worker(id=name, incarnation=incarnation, heartbeat_unix_ms=int(1000 * at), **{**fixed, **blocks, **told})
    )


def queue(name: str = "w0", undelivered: int = 0, pending: int = 0, age_ms: int = 0) -> dict[str, Any]:
    return plain(Queue(worker=name, undelivered=undelivered, pending=pending, oldest_age_ms=age_ms))


def looks(*snapshots: Snapshot) -> tuple[dict[str, Beats], list[tuple[Figures, ...]]]:
    """The last beats, and the workers' figures after each look."""
    beats: dict[str, Beats] = {}
    shown = []
    for each in snapshots:
        beats = follow(beats, each)
        shown.append(view(each, beats).workers)
    return beats, shown


def rates(figures: Figures) -> tuple[float | None, ...]:
    return (figures.output_tok_s, figures.computed_tok_s, figures.hit_rate, figures.step_ms, figures.busy)


UNKNOWN = (None,) * 5
COUNTS = {
    "steps": 10,
    "busy_s": 0.5,
    "computed_tokens": 700,
    "output_tokens": 100,
    "prefix_queried_tokens": 640,
    "prefix_hit_tokens": 320,
}
LATER = {
    "steps": 30,
    "busy_s": 1.5,
    "computed_tokens": 1700,
    "output_tokens": 300,
    "prefix_queried_tokens": 840,
    "prefix_hit_tokens": 470,
}


def test_rates_are_differences_by_the_brokers_time_between_two_heartbeats() -> None:
    first = Snapshot([worker(at=100.0, **COUNTS)], [queue(undelivered=3, pending=2, age_ms=1500)], LEDGER)
    second = replace(first, workers=[worker(at=102.0, **LATER)])
    _, ((before,), (after,)) = looks(first, second)
    assert rates(before) == UNKNOWN
    assert rates(after) == (100.0, 500.0, 0.75, 50.0, 0.5)
    assert (after.worker, after.state, after.circuit, after.model) == ("w0", "ready", "", "m")
    assert (after.running, after.waiting, after.max_running) == (2, 1, 8)
    assert (after.undelivered, after.pending, after.oldest_s) == (3, 2, 1.5)
    assert (after.blocks_used, after.blocks_cached, after.blocks_total) == (5, 3, 10)
    assert after.heartbeat_age_s == 0.25


def test_a_look_that_finds_no_new_heartbeat_keeps_what_was_known() -> None:
    first = Snapshot([worker(at=100.0, **COUNTS)], [], LEDGER)
    second = replace(first, workers=[worker(at=101.0, **LATER)])
    _, ((_,), (once,), (again,)) = looks(first, second, second)
    assert rates(once) == rates(again) != UNKNOWN


def test_another_incarnation_begins_anew() -> None:
    """Though it has counted more than the one before."""
    first = Snapshot([worker(at=100.0, **COUNTS)], [], LEDGER)
    second = replace(first, workers=[worker(incarnation="j", at=101.0, **LATER)])
    third = replace(first, workers=[worker(incarnation="j", at=102.0, **LATER)])
    beats, ((_,), (new,), (idle,)) = looks(first, second, third)
    assert rates(new) == UNKNOWN
    assert rates(idle) == (0.0, 0.0, None, None, 0.0)  # nothing was looked up, and there was no step
    assert beats["w0"].incarnation == "j"


@pytest.mark.parametrize("at", [99.0, 100.5])
def test_what_can_not_be_is_not_shown(at: float) -> None:
    """A broker's clock that went back; counters that did."""
    first = Snapshot([worker(at=100.0, **LATER)], [], LEDGER)
    counts = LATER if at < 100 else COUNTS
    _, (_, (after,)) = looks(first, replace(first, workers=[worker(at=at, **counts)]))
    assert rates(after) == UNKNOWN


def test_a_worker_that_is_gone_is_told_of_while_its_jobs_wait() -> None:
    queues = [queue("w1", undelivered=2, pending=1, age_ms=4000), queue("w2"), queue("w0")]
    beats, ((first, second),) = looks(Snapshot([worker(at=1.0)], queues, LEDGER))
    assert (first.worker, first.state) == ("w0", "ready")
    assert (second.worker, second.state, second.undelivered, second.pending) == ("w1", "gone", 2, 1)
    assert (second.oldest_s, second.heartbeat_age_s, rates(second)) == (4.0, None, UNKNOWN)
    assert beats.keys() == {"w0"}


def test_who_comes_back_has_no_rate_for_the_time_that_it_was_away() -> None:
    here, away = Snapshot([worker(at=100.0, **COUNTS)], [], LEDGER), Snapshot([], [], LEDGER)
    _, (_, nobody, (back,)) = looks(here, away, replace(here, workers=[worker(at=160.0, **LATER)]))
    assert nobody == ()
    assert rates(back) == UNKNOWN


def test_all_together() -> None:
    """What they give adds up; shares are of all that was looked up, and of all steps."""
    first = Snapshot([worker("w0", at=10.0, **COUNTS), worker("w1", at=10.2, **COUNTS)], [], LEDGER)
    third = worker("w2", at=11.0, running=7, **LATER)
    one_more = {**COUNTS, "steps": 20, "busy_s": 0.6, "output_tokens": 110, "prefix_queried_tokens": 840}
    second = Snapshot(
        [worker("w0", at=12.0, **LATER), worker("w1", at=12.2, **one_more), third],
        [queue("w0", 1, 2, 700), queue("w2", 3, 4, 900)],
        LEDGER,
    )
    total = view(second, follow(follow({}, first), second)).total
    assert (total.worker, total.state, total.running, total.max_running) == ("total", "", 11, 24)
    assert (total.undelivered, total.pending, total.oldest_s) == (4, 6, 0.9)
    assert (total.blocks_used, total.blocks_cached, total.blocks_total) == (15, 9, 30)
    assert (total.output_tok_s, total.computed_tok_s) == (105.0, 500.0)
    assert (total.hit_rate, total.step_ms) == (150 / 400, pytest.approx(1100 / 30))
    assert total.busy == pytest.approx((0.5 + 0.05) / 2)


@pytest.mark.parametrize(("accepted", "missing"), [(10, 0), (13, 3), (8, -2)])
def test_the_ledger_tells_what_is_missing(accepted: int, missing: int) -> None:
    shown = view(Snapshot([], [], {**LEDGER, "accepted": accepted}), {})
    assert shown.ledger["missing"] == missing
    assert (shown.workers, rates(shown.total), shown.total.oldest_s) == ((), UNKNOWN, 0.0)
