"""What can go wrong between a process and the broker.

::

    KvError
    ├── BrokerError                 the broker answered with an error that has no class of its own
    │   ├── BrokerUnreachable       no connection, no answer in time, or still loading; trying again may help
    │   ├── BrokerAuth              wrong password, or the user may not do this
    │   ├── BrokerTooOld            older than Redis 7.0
    │   ├── BrokerWrongType         a key is of another type than we write: somebody else wrote it
    │   └── BrokerFull              maxmemory is reached: new work is refused, running work goes on
    ├── BrokerUrl                   what should name a broker is no URL of one
    ├── SubmitError                 the job was not accepted
    │   ├── RequestIdTaken          another payload already has this request id
    │   ├── QueueFull               the worker's stream is at its bound
    │   ├── OverQuota               its tenant has asked for too much
    │   └── WorkerGone              the chosen worker lives no longer, was replaced, or is draining
    ├── RegistrationError
    │   └── WorkerIdTaken           a live worker has this id
    ├── KeysDamaged                 what should be API keys is not
    │   └── NoKeyFile               there is no file of them
    ├── CommitGap                   a chunk does not follow on what is committed: a fault of the caller
    └── MalformedValue              bytes in the broker that are not what they should be

Exceptions of the Redis client never leave this package: ``translation.translated`` turns them into these.
"""

# ruff: noqa: N818 (these names say what happened; a suffix would add nothing that `except` does not say)

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.tenants import request_id_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class KvError(Exception):
    """Base of all errors of this package."""


class BrokerError(KvError):
    """The broker answered with an error."""


class BrokerUnreachable(BrokerError):
    """No connection or no answer in time. Whether the command was executed is unknown."""


class BrokerAuth(BrokerError):
    """The broker refused the credentials, or the command for this user."""


class BrokerTooOld(BrokerError):
    """The broker's version is below the floor."""


class BrokerWrongType(BrokerError):
    """A key is of another type than we write: somebody else wrote it. Nothing passes that needs it until it is deleted.

    ``keys`` names it, where that is known; mostly there is one.
    """

    def __init__(self, message: str, keys: Sequence[str] = ()) -> None:
        super().__init__(f"{message} ({', '.join(keys)})" if keys else message)
        self.keys = tuple(keys)


class BrokerFull(BrokerError):
    """``maxmemory`` is reached; nothing was written."""


class BrokerUrl(KvError, ValueError):
    """What should name a broker is no URL of one."""


class SubmitError(KvError):
    """The job was not accepted; nothing was written."""


class RequestIdTaken(SubmitError):
    """Another payload already has this request id."""

    def __init__(self, request_id: str) -> None:
        cure = "choose another id, or send the same payload to get its answer"
        super().__init__(f"request_id {request_id_of(request_id)!r} is taken by another payload; {cure}")
        self.request_id = request_id


class QueueFull(SubmitError):
    """The worker's stream holds ``depth`` entries and may hold ``limit``."""

    def __init__(self, worker: str, depth: int, limit: int) -> None:
        super().__init__(f"the queue of worker {worker!r} is full: {depth} of {limit} entries")
        self.worker = worker
        self.depth = depth
        self.limit = limit


class OverQuota(SubmitError):
    """A tenant asks for more than it may. `what`: requests or tokens in a minute, or unfinished jobs. With this job
    there would be ``count``, and there may be ``limit``. ``retry_after_ms``: from when on it fits, if nothing else is
    asked for meanwhile; 0: not known; None: never, as this job alone is too much."""

    def __init__(self, what: str, count: int, limit: int, retry_after_ms: int | None) -> None:
        unit = {"requests": "requests in a minute", "tokens": "tokens in a minute", "jobs": "unfinished requests"}[what]
        never = "; ask for fewer: a shorter prompt, or less max_tokens" if retry_after_ms is None else ""
        super().__init__(f"with this request it would be {count} {unit}, and {limit} are allowed{never}")
        self.retry_after_ms = retry_after_ms


class WorkerGone(SubmitError):
    """The worker's lease is not that of the incarnation the job was meant for, or it is draining."""

    def __init__(self, worker: str, incarnation: str, why: str) -> None:
        super().__init__(f"worker {worker!r} ({incarnation}) takes no jobs: {why}")
        self.worker = worker
        self.incarnation = incarnation


class RegistrationError(KvError):
    """The worker could not be registered."""


class WorkerIdTaken(RegistrationError):
    """A live worker has this id."""

    def __init__(self, worker: str, holder: str) -> None:
        super().__init__(f"worker id {worker!r} is held by a live process (incarnation {holder})")
        self.worker = worker
        self.holder = holder


class KeysDamaged(KvError):
    """What should be API keys is not; the message says where, and what is wrong."""


class NoKeyFile(KeysDamaged):
    """There is no file where API keys should be."""


class CommitGap(KvError):
    """Chunks that do not start at the next token index of their choice. Nothing was written for them; all others
    were."""

    def __init__(self, expected: Mapping[str, Mapping[int, int]]) -> None:
        self.expected = {request_id: dict(indexes) for request_id, indexes in expected.items()}
        """Next token index by choice, by request id. Only of the choices whose chunks do not fit."""
        super().__init__(f"chunks do not follow on what is committed; next indexes: {self.expected}")


class MalformedValue(KvError):
    """Bytes that do not parse as what they should be."""
