"""I7: errors are of the right class, and no good request is refused for ever. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bench.chaos.findings import Finding
from bench.chaos.history import ATTACH, BAD, CANCEL, LOAD, PROBE
from bench.chaos.outages import excused
from bench.chaos.streams import accepted, is_ample, seen_of, timed_out

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.chaos.evidence import Rules, Run
    from bench.chaos.history import Call, Request

OURS: Final = frozenset({"UNAVAILABLE", "RESOURCE_EXHAUSTED"})
"""What a good request may meet at any time: to be tried again."""


REFUSALS: Final = OURS | {"DEADLINE_EXCEEDED"}
"""What a request that is never taken ends with."""


def check_codes(request: Request, run: Run, rules: Rules) -> Iterator[Finding]:
    """Every status of every call, and whether it was ever taken."""
    if request.invoked.role == BAD:
        yield from _check_refusal(request)
        return
    for number, call in enumerate(request.calls):
        if call.ended is not None:
            yield from _check_status(request, call, f"{request.id} call {number}")
    if _was_never_taken(request, run, rules):
        said = " ".join(call.status for call in request.streams)
        yield Finding("I7", "never taken", request.id, f"refused to its end, though there was time; calls: {said}")
    if request.invoked.role == PROBE and not all(one.whole for one in seen_of(request)):
        said = " ".join(call.status or "open" for call in request.streams)
        yield Finding("I7", "not served afterwards", request.id, f"sent when all was healed; calls: {said}")


def _was_never_taken(request: Request, run: Run, rules: Rules) -> bool:
    """Whether a good request met nothing but refusals to be tried again, in all the time it had."""
    calls = request.streams
    if request.invoked.role != LOAD or not calls or not is_ample(request, rules) or accepted(request, run):
        return False
    # Any other status is told by itself, so is a call that hangs.
    refused = all(call.status in REFUSALS for call in calls)
    return refused and request.cancelled_at is None and not excused(calls[-1], run)


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
