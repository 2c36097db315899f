"""What is to become of a line whose call failed. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import grpc

MAX_JOBS: Final = 3
"""Jobs that are made of one line, at most: each is another try of what failed for want of a worker, or was
cancelled with the batch before that was resumed."""
PAUSE_S: Final = (0.5, 10.0)
"""Before the next call: the first pause, and the longest, where nobody says how long."""
_PASSING: Final = (
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)
"""They tell of the fleet, or of the key that whoever runs batches has, not of the request."""


@dataclass(frozen=True, slots=True)
class Again:
    """The line is asked for again."""

    pause_s: float
    new_job: bool
    """Its job has ended: the next call makes another one."""


def judge(code: grpc.StatusCode, wait_s: float | None, *, ended: bool, jobs: int, failures: int) -> Again | None:
    """Whether a line is asked for again, and when; None: it has failed.

    `wait_s`: what the gateway says; `ended`: the job was accepted and has failed; `jobs`: how many were made of the
    line, this one included; `failures`: calls in a row that failed, this one included. A batch is in no hurry: what no
    gateway takes now, it waits for, however long.
    """
    # A gateway that has no room, or whose tenant has had enough, says when to come back; but for what will never fit.
    too_much = code is grpc.StatusCode.RESOURCE_EXHAUSTED and wait_s is None
    if code is grpc.StatusCode.CANCELLED and ended:
        return Again(0.0, new_job=True) if jobs < MAX_JOBS else None
    if code not in _PASSING or too_much or (ended and jobs >= MAX_JOBS):
        return None
    first, longest = PAUSE_S
    own = min(first * 2.0 ** min(failures - 1, 16), longest)
    return Again(own if wait_s is None else max(wait_s, first), new_job=ended)


def request_id(batch_id: str, number: int, job: int) -> str:
    """The id of a line's request: the same whoever runs it, so that who comes later finds what is there. `job`: from 0,
    how many were made of it before."""
    return f"{batch_id}.{number}" + (f".{job}" if job else "")
