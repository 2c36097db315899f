"""What a gateway measures of a call. The clock is the test's."""

from __future__ import annotations

import sys
from dataclasses import asdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from gateway import metrics as measured
from gateway.metrics import CALL_PARTS, Call, Metrics
from gateway.prefixes import Index
from kvstore.errors import BrokerUnreachable
from kvstore.ledger import Ledger
from kvstore.orphans import Rehomed
from kvstore.parts import Parts, Spent
from octavo.v1.inference_pb2 import Route

if TYPE_CHECKING:
    from kvstore.jobs import Jobs


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(measured.time, "monotonic", lambda: clock.now)
    return clock


def test_the_parts_of_a_call_follow_on_each_other(clock: SimpleNamespace) -> None:
    metrics = Metrics()
    call = Call(metrics)
    for part, seconds in (("check", 0.25), ("tokenize", 0.5), ("send", 1.0)):
        clock.now += seconds
        call.lap(part)
    assert metrics.parts.read() == {
        "check": Spent(1, 0.25),
        "tokenize": Spent(1, 0.5),
        "send": Spent(1, 1.0),
        "relay": Spent(0, 0.0),
    }


def test_a_response_is_relayed_from_when_its_delivery_was_heard(clock: SimpleNamespace) -> None:
    metrics = Metrics()
    call = Call(metrics)
    clock.now += 2.0
    call.output(1, 101.5)
    clock.now += 1.0
    call.output(2, 102.75)
    assert metrics.parts.read()["relay"] == Spent(2, 0.75)
    assert metrics.registry.get_sample_value("octavo_time_to_first_token_seconds_sum") == 2.0
    assert metrics.registry.get_sample_value("octavo_time_per_output_token_seconds_sum") == 0.5


@pytest.mark.parametrize(("found", "outcome"), [(64, "equal"), (48, "less"), (80, "more")])
def test_what_was_expected_in_a_cache_and_what_was_there(found: int, outcome: str) -> None:
    metrics = Metrics()
    call = Call(metrics)
    call.routed(Route(worker="w0", predicted_cached_tokens=64, cached_tokens=found, queue_ms=2500))
    shown = metrics.registry.get_sample_value
    outcomes = {each: shown("octavo_predictions_total", {"outcome": each}) for each in ("equal", "less", "more")}
    assert outcomes == {"equal": 0, "less": 0, "more": 0, outcome: 1}
    assert shown("octavo_predicted_cached_tokens_total") == 64
    assert shown("octavo_cached_tokens_total") == found
    assert shown("octavo_queue_seconds_sum") == 2.5


def test_who_attaches_counts_nothing_twice() -> None:
    metrics = Metrics()
    attached = Call(metrics)
    attached.replay = True
    attached.routed(Route(worker="w1", predicted_cached_tokens=64, cached_tokens=16, queue_ms=1))
    shown = metrics.registry.get_sample_value
    assert shown("octavo_predicted_cached_tokens_total") == 0
    assert [shown("octavo_predictions_total", {"outcome": each}) for each in ("equal", "less", "more")] == [0, 0, 0]
    assert shown("octavo_cached_tokens_total") == 0
    assert shown("octavo_queue_seconds_count") == 0


@pytest.mark.parametrize("state", Index)
def test_the_state_of_the_index_is_one_of_three(state: Index) -> None:
    metrics = Metrics()
    metrics.watch_index(lambda: state)
    shown = {each: metrics.registry.get_sample_value("octavo_prefix_index", {"state": each}) for each in Index}
    assert shown == {each: float(each is state) for each in Index}


def test_parts_the_broker_and_the_process_are_shown() -> None:
    metrics, spent = Metrics(), Parts()
    metrics.watch_broker(spent)
    spent.add("submit", 0.5)
    shown = metrics.registry.get_sample_value
    assert shown("octavo_broker_seconds_sum", {"call": "submit"}) == 0.5
    assert [shown("octavo_part_seconds_count", {"part": part}) for part in CALL_PARTS] == [0, 0, 0, 0]
    seconds = shown("process_cpu_seconds_total")
    if sys.platform == "linux":
        assert seconds is not None
        assert seconds > 0


def test_workers_by_state_and_whether_the_broker_answers() -> None:
    metrics, states, up = Metrics(), {"ready": 2, "draining": 1}, [True]
    metrics.watch_fleet(lambda: states, lambda: up[0])
    shown = metrics.registry.get_sample_value
    assert [shown("octavo_workers", {"state": each}) for each in states] == [2, 1]
    assert shown("octavo_broker_up") == 1
    # What is known of the fleet is old: nothing is shown rather than what may be wrong.
    states.clear()
    up[0] = False
    assert shown("octavo_workers", {"state": "ready"}) is None
    assert shown("octavo_broker_up") == 0


async def test_the_ledger_is_shown_as_last_read_and_not_without_a_broker() -> None:
    metrics = Metrics()
    shown = metrics.registry.get_sample_value
    assert shown("octavo_ledger_missing_jobs") is None
    found = Ledger(accepted=30, finished=6, failed=5, cancelled=4, expired=3, dead=2, in_flight=1)

    async def ledger() -> Ledger:
        return found

    await metrics.ledger.refresh(cast("Jobs", SimpleNamespace(ledger=ledger)))
    assert shown("octavo_ledger_missing_jobs") == 9 == found.missing
    counted = {each: shown("octavo_ledger_jobs", {"state": each}) for each in asdict(found)}
    assert counted == asdict(found)

    async def away() -> Ledger:
        raise BrokerUnreachable("away")

    with pytest.raises(BrokerUnreachable):
        await metrics.ledger.refresh(cast("Jobs", SimpleNamespace(ledger=away)))
    assert shown("octavo_ledger_missing_jobs") is None
    assert shown("octavo_ledger_jobs", {"state": "accepted"}) is None


def test_what_became_of_orphans_and_who_is_kept_from_jobs() -> None:
    metrics = Metrics()
    metrics.watch_breaker(lambda: 2)
    for outcome, number in ((Rehomed.MOVED, 3), (Rehomed.MOVED, 1), (Rehomed.DEAD, 1), (Rehomed.WAITING, 9)):
        metrics.count_rehomed(outcome, number)
    shown = metrics.registry.get_sample_value
    outcomes = {each.value: shown("octavo_rehomed_total", {"outcome": each.value}) for each in Rehomed}
    # One that waits would be counted four times a second.
    assert outcomes == {"moved": 4, "ended": 0, "dead": 1, "stale": 0, "waiting": None}
    assert shown("octavo_open_circuits") == 2
    assert shown("octavo_resubmitted_total") == 0
