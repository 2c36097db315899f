"""I7: errors are of the right class. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bench.chaos.findings import Finding
from bench.chaos.history import ATTACH, BAD, CANCEL, PROBE
from bench.chaos.streams import seen_of, timed_out

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.chaos.history import Call, Request

OURS: Final = frozenset({"UNAVAILABLE", "RESOURCE_EXHAUSTED"})
"""What a good request may meet at any time: to be tried again."""


def check_codes(request: Request) -> Iterator[Finding]:
    """Every status of every call."""
    if request.invoked.role == BAD:
        yield from _check_refusal(request)
        return
    for number, call in enumerate(request.calls):
        if call.ended is not None:
            yield from _check_status(request, call, f"{request.id} call {number}")
    if request.invoked.role == PROBE and not all(one.whole for one in seen_of(request)):
        said = " ".join(call.status or "open" for call in request.streams)
        yield Finding("I7", "not served afterwards", request.id, f"sent when all was healed; calls: {said}")


def _check_status(request: Request, call: Call, where: str) -> Iterator[Finding]:
    assert call.ended is not None
    status, message = call.ended.status, call.ended.message[:200]
    if call.began.verb != CANCEL and status == "OK" and any(chunk.finish == "ERROR" for chunk in call.chunks):
        yield Finding("I7", "wrong class", where, "OK for a request that ended with an error")
    elif _is_to_be_tried_again(call) and call.ended.retry_after_ms is None:
        yield Finding("I7", "no RetryInfo", where, f"{status}: {message}")
    elif status != "OK" and status not in OURS and not _own_doing(request, call, status):
        yield Finding("I7", "wrong class", where, f"{status} for a good request: {message}")


def _is_to_be_tried_again(call: Call) -> bool:
    """Whether the service itself turned the caller away: unlike a connection that broke, it knows for how long."""
    failed = any(chunk.finish == "ERROR" for chunk in call.chunks)
    return call.status == "RESOURCE_EXHAUSTED" or (call.status == "UNAVAILABLE" and failed)


def _own_doing(request: Request, call: Call, status: str) -> bool:
    if status == "DEADLINE_EXCEEDED":
        # An attempt at a Cancel has a limit of its own; what a stream had is what was left of the request's.
        return call.began.verb == CANCEL or timed_out(request)
    if status == "CANCELLED":
        return request.cancelled_at is not None
    # Somebody asks for a job whose broker has lost it, or whose retention is over.
    return status == "NOT_FOUND" and call.began.verb == ATTACH


def _check_refusal(request: Request) -> Iterator[Finding]:
    expected = request.invoked.expect
    for number, call in enumerate(request.streams):
        where = f"{request.id} call {number}"
        if call.chunks:
            yield Finding("I7", "bad input served", where, f"{expected} was right")
        elif call.ended is not None and call.status != expected and call.status not in OURS:
            yield Finding(
                "I7", "wrong class", where, f"{call.status}, {expected} was right: {call.ended.message[:200]}"
            )
    if not any(call.status == expected for call in request.streams):
        said = " ".join(call.status or "open" for call in request.streams)
        yield Finding("I7", "never refused", request.id, f"{expected} was right; calls: {said}")
