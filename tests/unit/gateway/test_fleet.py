"""What operators are told, made from what the broker says."""

from __future__ import annotations

import json

import pytest

from gateway.config import MAX_RESPONSE_BYTES
from gateway.fleet import again, dead_message, fitting, ledger_message
from kvstore.ledger import Ledger
from octavo.v1 import fleet_pb2, inference_pb2, job_pb2


def job(request_id: str = "r1", prompt: int = 3) -> job_pb2.Job:
    return job_pb2.Job(
        request_id=request_id,
        model="tiny",
        prompt_token_ids=range(prompt),
        sampling=inference_pb2.Sampling(seed=2**64 - 1),
        n=2,
    )


@pytest.mark.parametrize(
    ("request_id", "number", "new"),
    [
        ("r1", 1, "r1.retry-1"),
        ("r1.retry-3", 4, "r1.retry-4"),
        ("r1.retry-x", 1, "r1.retry-x.retry-1"),
        ("x" * 128, 12, "x" * 119 + ".retry-12"),
    ],
)
def test_a_retry_is_the_same_job_under_an_id_of_its_own(request_id: str, number: int, new: str) -> None:
    dead = job(request_id)
    retry = again(dead, number)
    assert (retry.request_id, retry.detached) == (new, True)
    assert (dead.request_id, dead.detached) == (request_id, False)
    retry.request_id, retry.detached = dead.request_id, False
    assert retry == dead


DEAD = job_pb2.DeadJob(job=job(), reason="3 workers died", attempts=4, worker="w1", died_unix_ms=1700000000000)


def test_one_of_the_dead_is_told_whole() -> None:
    told = dead_message(DEAD, whole=True)
    payload = json.loads(told.payload)
    assert payload["request_id"] == "r1"
    assert payload["prompt_token_ids"] == list(told.prompt_token_ids) == [0, 1, 2]
    assert payload["sampling"]["seed"] == str(2**64 - 1)
    assert "\n" not in told.payload


def test_of_many_nobody_is_shown_what_they_were_asked() -> None:
    told = dead_message(DEAD, whole=False)
    assert told == fleet_pb2.Dead(
        request_id="r1",
        model="tiny",
        reason="3 workers died",
        worker="w1",
        attempts=4,
        died_unix_ms=1700000000000,
        prompt_tokens=3,
    )
    whole = dead_message(DEAD, whole=True)
    del whole.prompt_token_ids[:]
    whole.payload = ""
    assert whole == told


def test_a_very_long_payload_is_left_out() -> None:
    long = dead_message(job_pb2.DeadJob(job=job(prompt=1_000_000)), whole=True)
    assert (long.payload, len(long.prompt_token_ids)) == ("", 1_000_000)
    assert long.ByteSize() < MAX_RESPONSE_BYTES


def test_the_ledger_is_told_as_it_is() -> None:
    told = ledger_message(Ledger(accepted=21, finished=6, failed=5, cancelled=4, expired=3, dead=2, in_flight=1))
    assert told == fleet_pb2.LedgerResponse(
        accepted=21, finished=6, failed=5, cancelled=4, expired=3, dead=2, in_flight=1
    )


def test_no_more_of_the_dead_than_a_response_has_room_for() -> None:
    large = [fleet_pb2.Dead(request_id=str(number), payload="x" * (1 << 20)) for number in range(6)]
    kept = list(fitting(large))
    assert [each.request_id for each in kept] == ["0", "1", "2"]
    assert fleet_pb2.ListDeadResponse(jobs=kept).ByteSize() <= MAX_RESPONSE_BYTES
    assert len(list(fitting(large[:2]))) == 2
    assert list(fitting([])) == []
    alone = fleet_pb2.Dead(payload="x" * (5 << 20))
    assert list(fitting([alone, *large])) == [alone]
