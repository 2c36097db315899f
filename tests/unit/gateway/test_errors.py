"""One table from exceptions to statuses."""

from __future__ import annotations

import logging
import re

import grpc
import pytest

from gateway import errors
from gateway.errors import Status, lookup, shown, status_of
from kvstore import errors as kv
from octavo.v1 import job_pb2

Code = grpc.StatusCode

TABLE = [
    (errors.AdmissionError("n", "2", "must be 1"), Status(Code.INVALID_ARGUMENT, "n is 2: must be 1")),
    (errors.ModelNotFound("x", ["a", "b"]), Status(Code.NOT_FOUND, "model 'x' is not served; served: 'a', 'b'")),
    (errors.JobNotFound("r1"), Status(Code.NOT_FOUND, "job 'r1' is unknown, or ended too long ago")),
    (errors.DeadJobNotFound("r1"), Status(Code.NOT_FOUND, "there is no dead job 'r1'")),
    (errors.NoWorker("no live worker"), Status(Code.UNAVAILABLE, "no live worker", 1000)),
    (errors.Overloaded("full"), Status(Code.RESOURCE_EXHAUSTED, "full", 1000)),
    (errors.Overloaded("full", 250), Status(Code.RESOURCE_EXHAUSTED, "full", 250)),
    (errors.DeadlinePassed("late"), Status(Code.DEADLINE_EXCEEDED, "late")),
    (errors.Draining("stopping"), Status(Code.UNAVAILABLE, "stopping", 1000)),
    (errors.JobLost("gone"), Status(Code.UNAVAILABLE, "gone", 1000)),
    (errors.JobGone("gone"), Status(Code.UNAVAILABLE, "gone", 1000)),
    (errors.JobDiffers("another"), Status(Code.DATA_LOSS, "another")),
    (
        kv.RequestIdTaken("r"),
        Status(
            Code.ALREADY_EXISTS,
            "request_id 'r' is taken by another payload; choose another id, or send the same payload to get its answer",
        ),
    ),
    (kv.QueueFull("w", 4, 4), Status(Code.RESOURCE_EXHAUSTED, "the queue of worker 'w' is full: 4 of 4 entries", 1000)),
    (
        kv.BrokerFull("broker at secret-host:6379 is full: OOM"),
        Status(Code.RESOURCE_EXHAUSTED, "the broker's memory is full; try again later", 1000),
    ),
    (
        kv.BrokerUnreachable("redis://user@secret-host:6379 refused"),
        Status(Code.UNAVAILABLE, "the broker does not answer; try again", 1000),
    ),
    (
        kv.BrokerWrongType("broker at secret-host:6379: WRONGTYPE", ["{octavo:default}:workers"]),
        Status(
            Code.UNAVAILABLE,
            "in the broker key {octavo:default}:workers is of another type than is written there; "
            "whoever runs this must delete it",
            1000,
        ),
    ),
    (
        kv.BrokerWrongType("broker at secret-host:6379: WRONGTYPE"),
        Status(
            Code.UNAVAILABLE,
            "in the broker a key, which it does not name, is of another type than is written there; "
            "whoever runs this must delete it",
            1000,
        ),
    ),
    (
        kv.BrokerError("broker at secret-host:6379: ERR unknown command"),
        Status(
            Code.UNAVAILABLE,
            "the broker answers with an error, which the gateway's log has; whoever runs this must look there",
            1000,
        ),
    ),
    (
        kv.BrokerAuth("user x"),
        Status(Code.UNAVAILABLE, "the broker refuses access; whoever runs this must allow it", 1000),
    ),
    (errors.Unauthenticated("no key"), Status(Code.UNAUTHENTICATED, "no key")),
    (errors.Forbidden("not yours"), Status(Code.PERMISSION_DENIED, "not yours")),
    (errors.JobFailed(job_pb2.FAILURE_INVALID, "bad"), Status(Code.INVALID_ARGUMENT, "bad")),
    (errors.JobFailed(job_pb2.FAILURE_EXHAUSTED, "no room"), Status(Code.RESOURCE_EXHAUSTED, "no room", 1000)),
    (errors.JobFailed(job_pb2.FAILURE_UNAVAILABLE, "w died"), Status(Code.UNAVAILABLE, "w died", 1000)),
    (errors.JobFailed(job_pb2.FAILURE_DEADLINE, "late"), Status(Code.DEADLINE_EXCEEDED, "late")),
    (errors.JobFailed(job_pb2.FAILURE_INTERNAL, "non-finite logits"), Status(Code.INTERNAL, "non-finite logits")),
    (errors.JobFailed(job_pb2.FAILURE_DEAD, "3 workers died"), Status(Code.INTERNAL, "3 workers died")),
    (errors.JobFailed(job_pb2.FAILURE_NONE, ""), Status(Code.INTERNAL, "the job failed")),
]


@pytest.mark.parametrize(
    ("error", "status"), TABLE, ids=[f"{type(error).__name__}-{status.code.name}" for error, status in TABLE]
)
def test_status(error: Exception, status: Status) -> None:
    assert lookup(error) == status
    assert status_of(error) == status


def test_every_failure_of_a_job_has_a_status() -> None:
    codes = {name: status_of(errors.JobFailed(value, "x")).code for name, value in job_pb2.Failure.items()}
    assert Code.UNKNOWN not in codes.values()
    internal = {name for name, code in codes.items() if code is Code.INTERNAL}
    assert internal == {"FAILURE_NONE", "FAILURE_INTERNAL", "FAILURE_DEAD"}


def test_every_error_of_this_package_is_in_the_table() -> None:
    kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.GatewayError)]
    tabled = {type(error) for error, _ in TABLE}
    assert set(kinds) - {errors.GatewayError} == {kind for kind in tabled if issubclass(kind, errors.GatewayError)}


def test_the_unknown_is_logged_with_its_traceback_and_kept_from_the_client(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError) as caught:
        raise KeyError("/home/me/secret.py")
    with caplog.at_level(logging.ERROR):
        status = status_of(caught.value)
    assert lookup(caught.value) is None
    assert status.code is Code.INTERNAL
    match = re.fullmatch(r"internal error ([0-9a-f]{8})", status.message)
    assert match
    assert match[1] in caplog.text
    assert "secret.py" in caplog.text
    assert "Traceback" in caplog.text


def test_the_brokers_own_words_are_for_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Behind one of ours as well."""
    with pytest.raises(errors.JobLost) as caught:
        raise errors.JobLost("lost") from kv.BrokerUnreachable("secret-host:6379 refused")
    assert status_of(caught.value).message == "lost"
    assert "a call failed on the broker: secret-host:6379 refused" in caplog.text


def test_a_value_is_shown_but_never_at_length() -> None:
    assert shown("a\nb") == "'a\\nb'"
    assert shown("x" * 64) == repr("x" * 64)
    assert shown("x" * 1_000_000) == f"'{'x' * 64}'... (1000000 characters)"
    assert shown(0.1) == "0.1"
    assert shown(3) == "3"
