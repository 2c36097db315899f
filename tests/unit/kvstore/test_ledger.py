"""Where a job's end is counted."""

from __future__ import annotations

import pytest

from kvstore.ledger import Ledger, outcome
from octavo.v1 import inference_pb2, job_pb2

OF_FINISH = {
    inference_pb2.FINISH_REASON_UNSPECIFIED: "",
    inference_pb2.STOP: "finished",
    inference_pb2.LENGTH: "finished",
    inference_pb2.CANCELLED: "cancelled",
}
OF_FAILURE = {
    job_pb2.FAILURE_NONE: "failed",
    job_pb2.FAILURE_INVALID: "failed",
    job_pb2.FAILURE_EXHAUSTED: "failed",
    job_pb2.FAILURE_UNAVAILABLE: "failed",
    job_pb2.FAILURE_DEADLINE: "expired",
    job_pb2.FAILURE_INTERNAL: "failed",
    job_pb2.FAILURE_DEAD: "dead",
}


def test_every_end_has_one_place() -> None:
    assert {finish: outcome(finish, job_pb2.FAILURE_NONE) for finish in OF_FINISH} == OF_FINISH
    assert {failure: outcome(inference_pb2.ERROR, failure) for failure in OF_FAILURE} == OF_FAILURE
    assert set(OF_FINISH) | {inference_pb2.ERROR} == set(inference_pb2.FinishReason.values())
    assert set(OF_FAILURE) == set(job_pb2.Failure.values())


@pytest.mark.parametrize("field", range(7))
def test_it_holds_only_when_all_are_counted_once(field: int) -> None:
    counts = [21, 1, 2, 3, 4, 5, 6]
    assert Ledger(*counts).holds
    for change in (-1, 1):
        changed = list(counts)
        changed[field] += change
        assert not Ledger(*changed).holds
