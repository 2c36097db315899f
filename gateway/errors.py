"""Every way a call can fail, and the one table that turns it into a gRPC status.

::

    GatewayError
    ├── AdmissionError      INVALID_ARGUMENT     the request breaks a bound; the message names field, value and limit
    ├── Unauthenticated     UNAUTHENTICATED      keys are in use, and the call carries none that holds
    ├── Forbidden           PERMISSION_DENIED    what an operator's key is needed for
    ├── ModelNotFound       NOT_FOUND            nobody serves a model of that name
    ├── JobNotFound         NOT_FOUND            nobody knows a job of that id
    ├── DeadJobNotFound     NOT_FOUND            no dead job of that id is kept
    ├── NoWorker            UNAVAILABLE          no live worker of a known model takes jobs
    ├── Overloaded          RESOURCE_EXHAUSTED   every queue is full, or this gateway has too many streams
    ├── DeadlinePassed      DEADLINE_EXCEEDED    the client's deadline passed before the job was queued
    ├── Draining            UNAVAILABLE          this gateway is stopping
    ├── JobLost             UNAVAILABLE          an accepted job's output can't be read any more
    │   ├── JobGone         UNAVAILABLE          the job itself is no longer in the broker
    │   └── JobDiffers      DATA_LOSS            it was run anew, and gave another answer
    └── JobFailed           by its Failure       the job ended with finish ERROR

Errors of ``kvstore`` are in the table too. Whatever is not becomes INTERNAL with a short id: the traceback goes to the
log under that id, never to the client.
"""

# ruff: noqa: N818 (as in kvstore.errors: the names say what happened)

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass
from typing import Final

import grpc

from kvstore import errors as kv
from kvstore.logs import noted
from octavo.v1 import job_pb2

logger = logging.getLogger(__name__)

RETRY_AFTER_MS: Final = 1000
"""What a caller is told to wait where nothing more is known."""

SHOWN_VALUE: Final = 64
"""Characters of a refused value that an error message repeats."""


class GatewayError(Exception):
    """Base of the gateway's own errors; its text is meant for the client."""


class AdmissionError(GatewayError):
    """The request breaks a bound. Nothing was queued. `value` is text; what the client wrote goes through ``shown``."""

    def __init__(self, field: str, value: str, limit: str) -> None:
        super().__init__(f"{field} is {value}: {limit}")
        self.field = field


class Unauthenticated(GatewayError):
    """The call carries no API key that holds."""


class Forbidden(GatewayError):
    """The caller's key is not for this."""


class ModelNotFound(GatewayError):
    """No model of that name is known."""

    def __init__(self, name: str, served: list[str]) -> None:
        super().__init__(f"model {shown(name)} is not served; served: {', '.join(map(repr, served))}")


class JobNotFound(GatewayError):
    """No job of that id is known."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"job {shown(request_id)} is unknown, or ended too long ago")


class DeadJobNotFound(GatewayError):
    """No dead job of that id is kept."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"there is no dead job {shown(request_id)}")


class NoWorker(GatewayError):
    """No live worker takes jobs of that model."""


STARTING: Final = (
    "workers may still be starting, or loading the model: `octavo workers` lists those that serve, their logs tell more"
)
"""What may be so when there is no worker; a gateway knows of a worker only once it serves."""


class Overloaded(GatewayError):
    """No room for another job now. `retry_after_ms`: when there may be."""

    def __init__(self, message: str, retry_after_ms: int = RETRY_AFTER_MS) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class DeadlinePassed(GatewayError):
    """The client's deadline passed before anything was queued."""


class Draining(GatewayError):
    """The gateway is stopping."""


class JobLost(GatewayError):
    """An accepted job, or its output, cannot be read any more."""


class JobGone(JobLost):
    """An accepted job is no longer in the broker. Who knows its payload can submit it again."""


class JobDiffers(JobLost):
    """A job that was run anew gave other tokens than its caller has. No call can go on with these."""


class JobFailed(GatewayError):
    """The job ended with finish ERROR and this failure."""

    def __init__(self, failure: job_pb2.Failure, message: str) -> None:
        super().__init__(message or "the job failed")
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Status:
    """What the client gets. `retry_after_ms`: None where trying again at once, or ever, is not advised."""

    code: grpc.StatusCode
    message: str
    retry_after_ms: int | None = None


# The first class that fits decides, so a class stands before its bases.
_TABLE: Final[tuple[tuple[type[Exception], grpc.StatusCode, int | None], ...]] = (
    (AdmissionError, grpc.StatusCode.INVALID_ARGUMENT, None),
    (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED, None),
    (Forbidden, grpc.StatusCode.PERMISSION_DENIED, None),
    (ModelNotFound, grpc.StatusCode.NOT_FOUND, None),
    (JobNotFound, grpc.StatusCode.NOT_FOUND, None),
    (DeadJobNotFound, grpc.StatusCode.NOT_FOUND, None),
    (NoWorker, grpc.StatusCode.UNAVAILABLE, RETRY_AFTER_MS),
    (DeadlinePassed, grpc.StatusCode.DEADLINE_EXCEEDED, None),
    (Draining, grpc.StatusCode.UNAVAILABLE, RETRY_AFTER_MS),
    (JobDiffers, grpc.StatusCode.DATA_LOSS, None),
    (JobLost, grpc.StatusCode.UNAVAILABLE, RETRY_AFTER_MS),
    (kv.RequestIdTaken, grpc.StatusCode.ALREADY_EXISTS, None),
    (kv.QueueFull, grpc.StatusCode.RESOURCE_EXHAUSTED, RETRY_AFTER_MS),
    (kv.WorkerGone, grpc.StatusCode.UNAVAILABLE, RETRY_AFTER_MS),
    (kv.BrokerFull, grpc.StatusCode.RESOURCE_EXHAUSTED, RETRY_AFTER_MS),
    (kv.BrokerError, grpc.StatusCode.UNAVAILABLE, RETRY_AFTER_MS),
)

# The broker's own words may hold its address or a user's name: a client gets ours. The first class that fits.
_BROKER_WORDS: Final[tuple[tuple[type[kv.BrokerError], str], ...]] = (
    (kv.BrokerFull, "the broker's memory is full; try again later"),
    (kv.BrokerAuth, "the broker refuses access; whoever runs this must allow it"),
    (kv.BrokerUnreachable, "the broker does not answer; try again"),
    (
        kv.BrokerError,
        "the broker answers with an error, which the gateway's log has; whoever runs this must look there",
    ),
)

_FAILURES: Final[dict[int, tuple[grpc.StatusCode, int | None]]] = {
    job_pb2.FAILURE_INVALID: (grpc.StatusCode.INVALID_ARGUMENT, None),
    job_pb2.FAILURE_EXHAUSTED: (grpc.StatusCode.RESOURCE_EXHAUSTED, RETRY_AFTER_MS),
    job_pb2.FAILURE_UNAVAILABLE: (grpc.StatusCode.UNAVAILABLE, RETRY_AFTER_MS),
    job_pb2.FAILURE_DEADLINE: (grpc.StatusCode.DEADLINE_EXCEEDED, None),
    job_pb2.FAILURE_INTERNAL: (grpc.StatusCode.INTERNAL, None),
    job_pb2.FAILURE_DEAD: (grpc.StatusCode.INTERNAL, None),
}


def lookup(error: Exception) -> Status | None:
    """The status for an exception that the table knows."""
    if isinstance(error, JobFailed):
        code, retry = _FAILURES.get(error.failure, (grpc.StatusCode.INTERNAL, None))
        return Status(code, str(error), retry)
    if isinstance(error, Overloaded):
        return Status(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), error.retry_after_ms)
    if isinstance(error, kv.OverQuota):
        wait = error.retry_after_ms
        return Status(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), RETRY_AFTER_MS if wait == 0 else wait)
    for kind, code, retry in _TABLE:
        if isinstance(error, kind):
            return Status(code, told(error), retry)
    return None


def told(error: Exception) -> str:
    """What a client is told of an error that the table knows: its text, but of the broker nothing that names it."""
    if isinstance(error, kv.BrokerWrongType):
        which = f"key {error.keys[0]}" if error.keys else "a key, which it does not name,"
        return f"in the broker {which} is of another type than is written there; whoever runs this must delete it"
    return next((words for kind, words in _BROKER_WORDS if isinstance(error, kind)), str(error))


def status_of(error: Exception) -> Status:
    """The status for any exception. Logs, with its traceback, what the table does not know."""
    if (status := lookup(error)) is not None:
        trouble = error if isinstance(error, kv.BrokerError) else error.__cause__
        if isinstance(trouble, kv.BrokerError):
            logger.error("a call failed on the broker: %s", trouble, extra=noted(error))
        return status
    error_id = secrets.token_hex(4)
    logger.error("internal error %s", error_id, exc_info=error, extra=noted(error))
    return Status(grpc.StatusCode.INTERNAL, f"internal error {error_id}")


def shown(value: str | float) -> str:
    """A client's value as an error message repeats it: text quoted, and never more than a line of it."""
    if isinstance(value, str):
        return repr(value) if len(value) <= SHOWN_VALUE else f"{value[:SHOWN_VALUE]!r}... ({len(value)} characters)"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
