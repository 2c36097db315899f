"""What the broker says about a job, and how it is read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from kvstore.limits import MAX_CHOICES, broken
from octavo.v1 import job_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence


class Submitted(Enum):
    """What ``submit`` did."""

    ACCEPTED = "accepted"
    ATTACHED = "attached"
    """The job was there already: the caller now gets its deliveries, and finds the earlier ones in the log."""


@dataclass(frozen=True, slots=True)
class Attached:
    """A job that was there already."""

    submitted: Submitted
    worker: str
    """Where the job is."""
    predicted: int
    """Prompt tokens that were expected in that worker's cache."""
    fingerprint: str
    """Of the model at that worker; empty: unknown."""


class Commit(Enum):
    """What became of one delivery."""

    WRITTEN = "written"
    DUPLICATE = "duplicate"
    """Written before, by the same attempt: a retry after a lost reply."""
    FENCED = "fenced"
    """The job has ended, or belongs to another attempt: drop the sequence."""


@dataclass(frozen=True, slots=True)
class Committed:
    """What became of one commit."""

    outcomes: list[Commit]
    """Of each delivery, in order."""
    held_count: int | None
    """Blocks that the prefix index has for this incarnation after it; None when there was nothing to commit."""


class Finished(Enum):
    """What ``finish`` did."""

    ENDED = "ended"
    ALREADY = "already"
    """It had ended before."""
    UNKNOWN = "unknown"
    """No such job, or its retention is over."""
    FENCED = "fenced"
    """It is not the attempt, the gateway's or the caller's that was expected."""


class JobState(StrEnum):
    """Where a job is in its life."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that this incarnation now owns."""

    job: job_pb2.Job
    attempt: int
    remaining_ms: int | None
    """Until the deadline, by the broker's clock; 0 when it has passed, None when there is none."""
    queued_ms: int
    """From submission to the claim that began this attempt."""
    gateway: str
    entry_id: str
    """Tells a claim that was repeated (same entry) from a job submitted anew under its request id, after the broker
    lost the first: that one is to be started afresh."""
    next: tuple[int, ...] = ()
    """Of each choice: the token index that this attempt goes on from, which is also how many tokens are committed."""
    ended: frozenset[int] = frozenset()
    """Choices that have ended: they are not to be run again."""
    cached_tokens: int = 0
    """Of the prompt, as the first delivery told; 0 before that."""
    predicted: int = 0
    """Tokens that it is expected to find here: by the router, or by the thief."""


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job's hash, without its payload."""

    request_id: str
    state: JobState
    attempt: int
    owner: str
    """Incarnation that claimed it; empty while queued."""
    entry: str
    """Its place in the worker's stream: with the attempt it tells one life of a request id from another, as a job that
    was lost and submitted again begins with attempt 1 anew."""
    worker: str
    worker_incarnation: str
    gateway: str
    next: dict[int, int]
    """Next token index by choice, which is also how many tokens are committed. Every choice of the job is there."""
    ends: dict[int, int]
    """How the worker ended choices, by choice: inference_pb2.FinishReason. An end from outside is not in it."""
    prompt_tokens: int
    predicted: int
    """Prompt tokens that are expected in the cache of the worker that has it: by the router, or by the thief."""
    cached_tokens: int
    started: bool
    """It has its first delivery, and with it the true ``cached_tokens``."""
    fetched_tokens: int
    """Of those, taken from the page store."""
    fingerprint: str
    """Of the model at the worker that has it; empty: unknown."""
    deaths: int
    """Workers in a row that died before they got a few tokens of it, as far as it has been moved."""
    digest: bytes
    """Of what was asked for: with the same one it is the same job."""
    detached: bool
    """Nobody's leaving ends it."""
    stolen_from: str
    """Worker that the job was taken from last; empty: it is where it was submitted to."""
    finish: int | None
    """inference_pb2.FinishReason once it has ended: of the choice that ended last, or of the end from outside."""
    submitted_ms: int
    """By the broker's clock."""
    remaining_ms: int | None
    """As in Claim."""


RECORD_FIELDS = (
    *("state", "attempt", "owner", "entry", "worker", "worker_incarnation", "gateway"),
    *("prompt_tokens", "predicted", "cached_tokens", "stolen_from"),
    *("fetched_tokens", "fingerprint", "deaths", "detached"),
    *("submitted_ms", "deadline_ms", "digest", "finish", "choices"),
    *(f"next:{choice}" for choice in range(MAX_CHOICES)),
    *(f"end:{choice}" for choice in range(MAX_CHOICES)),
)


def charge(job: job_pb2.Job) -> int:
    """Tokens that a job is charged to its worker's load: its prompt, and every answer at its maximum."""
    return len(job.prompt_token_ids) + max(job.n, 1) * job.stopping.max_tokens


MOST_MS = 10**14
"""No time that this system writes is as late (year 5138)."""
MOST_ATTEMPTS = 2**31
"""What a delivery has room for."""


def remaining_of(deadline_ms: bytes | int | None, now_ms: int) -> int | None:
    """Milliseconds until a deadline; None: there is none. Raises ValueError when that isn't what we write."""
    return max(0, number(deadline_ms, MOST_MS) - now_ms) if deadline_ms else None


def number(text: bytes | int | None, most: int) -> int:
    """A count or a time as scripts write it. Raises ValueError on anything else."""
    plain = isinstance(text, bytes) and text.isdigit() and len(text) <= 15 and (text == b"0" or text[:1] != b"0")
    if not (plain or isinstance(text, int)) or text is None or not 0 <= int(text) <= most:
        raise ValueError(f"{text!r:.40} is not 0 to {most}")
    return int(text)


def text_of(value: bytes | None) -> str:
    """A name. Raises ValueError where there is none."""
    if value is None:
        raise ValueError("it has no owner, entry, worker or gateway")
    return value.decode()


MOST_TOKENS = 2**32 - 1
"""Of an answer: what a chunk has room for."""
MOST_FINISH = 255
"""Ways to end have smaller numbers."""
MOST_GATEWAY = 128
"""Bytes of a gateway's name; ours have 16."""


def parse_job(payload: bytes | int | None, request_id: str) -> job_pb2.Job:
    """The job in a payload. Raises ValueError when no gateway can have written it; a payload that was too long to be
    read is told by its length."""
    if isinstance(payload, int):
        raise ValueError(f"its payload has {payload} bytes, more than its worker's context has room for")
    try:
        job = job_pb2.Job.FromString(payload or b"")
    except DecodeError:
        raise ValueError("its payload does not parse") from None
    if job.request_id != request_id or not job.prompt_token_ids:
        raise ValueError("its payload is another job's, or has no prompt")
    if reason := broken(job):
        raise ValueError(reason)
    return job


def require_choices(job: job_pb2.Job, choices: Sequence[object]) -> None:
    """Raises ValueError when a job has more or fewer of them than its payload says."""
    if len(choices) != max(job.n, 1):
        raise ValueError(f"it has {max(job.n, 1)} choices by its payload and {len(choices)} by its hash")


def count_of(choices: bytes | int | None) -> int:
    """How many choices a job has by its hash. Raises ValueError when that isn't what we write."""
    if (count := number(choices, MAX_CHOICES)) < 1:
        raise ValueError("it has no choices by its hash")
    return count


def parse_positions(
    told: Sequence[bytes | int | None], choices: bytes | int | None
) -> tuple[tuple[int, ...], frozenset[int]]:
    """Next index of each choice, and the choices that have ended, from what scripts tell of a job: next index and end
    of each, or nothing where nothing can be committed. Raises ValueError when that isn't what we write."""
    count = count_of(choices)
    told = told or [None] * (2 * count)
    past = tuple(number(index or 0, MOST_TOKENS) for index in told[::2])
    return past, frozenset(choice for choice, end in enumerate(told[1::2]) if finish_of(end) is not None)


def finish_of(end: bytes | int | None) -> int | None:
    """How a worker ended a choice; None: it has not. Raises ValueError when that isn't what we write."""
    if end is None:
        return None
    if (finish := number(end, MOST_FINISH)) < 1:
        raise ValueError("a choice has ended, and in no way")
    return finish


def parse_record(request_id: str, stored: Any, now_ms: int) -> JobRecord | None:
    """None: there is no such job. Raises ValueError when its hash isn't what we write."""
    if not isinstance(stored, list) or stored[0] is None:
        return None
    state, attempt, owner, entry, worker, worker_incarnation, gateway, *numbers = stored
    prompt_tokens, predicted, cached_tokens, stolen_from, *numbers = numbers
    fetched_tokens, fingerprint, deaths, detached, *numbers = numbers
    submitted_ms, deadline_ms, digest, finish, choices, *by_choice = numbers
    count = count_of(choices)
    past = {choice: number(index or 0, MOST_TOKENS) for choice, index in enumerate(by_choice[:count])}
    told = map(finish_of, by_choice[MAX_CHOICES:][:count])
    ends = {choice: end for choice, end in enumerate(told) if end is not None}
    if len(ends) == count and state != JobState.ENDED.encode():
        raise ValueError(f"all of its {count} choices have ended, and it has not")
    return JobRecord(
        request_id=request_id,
        state=JobState(state.decode()),
        attempt=number(attempt, MOST_ATTEMPTS),
        owner=text_of(owner),
        entry=text_of(entry),
        worker=text_of(worker),
        worker_incarnation=text_of(worker_incarnation),
        gateway=text_of(gateway),
        next=past,
        ends=ends,
        prompt_tokens=number(prompt_tokens, MOST_TOKENS),
        predicted=number(predicted or 0, MOST_TOKENS),
        cached_tokens=number(cached_tokens, MOST_TOKENS),
        started=bool(ends) or any(past.values()),
        fetched_tokens=number(fetched_tokens or 0, MOST_TOKENS),
        fingerprint=(fingerprint or b"").decode(),
        deaths=number(deaths or 0, MOST_ATTEMPTS),
        digest=digest or b"",
        detached=detached == b"1",
        stolen_from=(stolen_from or b"").decode(),
        finish=None if finish is None else number(finish, MOST_FINISH),
        submitted_ms=number(submitted_ms, MOST_MS),
        remaining_ms=remaining_of(deadline_ms, now_ms),
    )
