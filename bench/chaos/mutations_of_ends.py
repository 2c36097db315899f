"""Lies about how requests ended, and with what status; see ``mutations``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from bench.chaos.evidence import AMPLE_S
from bench.chaos.history import ATTACH, BAD, GENERATE, LOAD, PROBE, Call, Called, Came, Ended, Request
from bench.chaos.mutations_of_tokens import OTHER
from bench.chaos.places import at, copied, is_whole, last_calls, of_role, put, with_tokens
from bench.chaos.streams import WHOLE, cancelled_by, seen_of

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from bench.chaos.evidence import Run


def double_finish(run: Run, numbers: random.Random) -> Run | None:
    """A terminal chunk comes twice."""

    def places(request: Request) -> Iterator[tuple[Call, int]]:
        for call in request.streams:
            yield from ((call, index) for index, chunk in enumerate(call.chunks) if chunk.finish)

    def change(call: Call, index: int) -> None:
        end = call.chunks[index]
        call.chunks.append(replace(end, start=end.start + len(end.tokens), tokens=(), text=""))

    return at(run, numbers, places, change)


def token_after_the_end(run: Run, numbers: random.Random) -> Run | None:
    """One more, behind the terminal chunk."""

    def places(request: Request) -> Iterator[tuple[Call, int]]:
        for call in request.streams:
            yield from ((call, index) for index, chunk in enumerate(call.chunks) if chunk.finish in WHOLE)

    def change(call: Call, index: int) -> None:
        end = call.chunks[index]
        call.chunks.append(replace(end, start=end.start + len(end.tokens), tokens=(OTHER,), text="x", finish=""))

    return at(run, numbers, places, change)


def missing_finish(run: Run, numbers: random.Random) -> Run | None:
    """A choice has all its tokens and no end, in any call."""
    candidates = [request for request in of_role(run, LOAD) if is_whole(request)]
    if not candidates:
        return None
    request = copied(numbers.choice(candidates))
    choice = numbers.randrange(request.invoked.n)
    for call in request.streams:
        call.chunks = [replace(one, finish="") if one.choice == choice else one for one in call.chunks]
    return put(run, request)


def ends_in_two_ways(run: Run, numbers: random.Random) -> Run | None:
    """Asked again, a request has ended otherwise."""
    candidates = [request for request in of_role(run, LOAD) if is_whole(request)]
    if not candidates:
        return None
    request = copied(numbers.choice(candidates))
    last = request.calls[-1]
    assert last.ended is not None
    number = len(request.calls)
    have = {choice: len(one.tokens) for choice, one in enumerate(seen_of(request))}
    again = Call(Called(request.id, number, last.ended.at, ATTACH, last.began.target, have))
    end = Came(request.id, number, last.ended.at, choice=0, start=have[0], finish="ERROR")
    again.chunks.append(end)
    again.ended = replace(last.ended, call=number, status="UNAVAILABLE", retry_after_ms=1000)
    request.calls.append(again)
    return put(run, request)


def lost_request(run: Run, numbers: random.Random) -> Run | None:
    """It was accepted, then there is only UNAVAILABLE."""
    candidates = [request for request in of_role(run, LOAD) if is_whole(request)]
    if not candidates:
        return None
    request = copied(numbers.choice(candidates))
    call = request.streams[-1]
    request.calls = [*request.calls[: request.calls.index(call)], call]
    for one in request.streams:
        one.chunks = [chunk for chunk in one.chunks if not chunk.finish]
    call.usage = None
    call.ended = Ended(request.id, call.began.call, call.began.at, "UNAVAILABLE")
    return put(run, request)


def hanging_call(run: Run, numbers: random.Random) -> Run | None:
    """The last call never ends."""

    def change(call: Call, _: int) -> None:
        call.ended = None

    return at(run, numbers, last_calls, change)


def late_end(run: Run, numbers: random.Random) -> Run | None:
    """A request ends long after its deadline."""
    candidates = [request for request in of_role(run, LOAD) if is_whole(request) and request.invoked.deadline_s]
    if not candidates:
        return None
    request = copied(numbers.choice(candidates))
    last = request.streams[-1]
    assert last.ended is not None
    assert request.invoked.deadline_s is not None
    last.ended = replace(last.ended, at=request.invoked.at + request.invoked.deadline_s + 60.0)
    return put(run, request)


def output_after_a_cancel(run: Run, numbers: random.Random) -> Run | None:
    """A worker goes on with a cancelled request."""

    def places(request: Request) -> Iterator[tuple[Call, int]]:
        for call, index, _ in with_tokens(request):
            told = cancelled_by(request, call.began.target)
            if told is not None and call.began.at < told:
                yield call, index

    def change(call: Call, index: int) -> None:
        call.chunks[index:] = [replace(one, at=one.at + 10.0) for one in call.chunks[index:]]
        if call.ended is not None:
            call.ended = replace(call.ended, at=call.ended.at + 10.0)

    return at(run, numbers, places, change)


def error_of_the_wrong_class(run: Run, numbers: random.Random) -> Run | None:
    """A good request is told that it is bad, or that something broke."""
    return _refused_first(run, numbers, numbers.choice(("INTERNAL", "UNKNOWN", "INVALID_ARGUMENT", "ALREADY_EXISTS")))


def bad_input_breaks_something(run: Run, numbers: random.Random) -> Run | None:
    """Bad input meets a server's error instead of a refusal."""
    bad = of_role(run, BAD)
    if not bad:
        return None
    request = copied(numbers.choice(bad))
    last = request.streams[-1]
    assert last.ended is not None
    last.ended = replace(last.ended, status=numbers.choice(("INTERNAL", "UNKNOWN")))
    return put(run, request)


def overload_without_retry_info(run: Run, numbers: random.Random) -> Run | None:
    """A client is turned away and not told for how long."""
    return _refused_first(run, numbers, "RESOURCE_EXHAUSTED")


def no_service_afterwards(run: Run, numbers: random.Random) -> Run | None:
    """A probe, sent when all faults were healed, is refused."""
    probes = of_role(run, PROBE)
    if not probes:
        return None
    request = copied(numbers.choice(probes))
    for call in request.streams:
        call.chunks.clear()
        call.usage = None
        assert call.ended is not None
        call.ended = replace(call.ended, status="UNAVAILABLE")
    return put(run, request)


def refused_for_ever(run: Run, numbers: random.Random) -> Run | None:
    """A good request is turned away in all the time it had, and the broker knows nothing of it."""
    candidates = [request for request in of_role(run, LOAD) if is_whole(request) and request.cancelled_at is None]
    if not candidates:
        return None
    chosen = numbers.choice(candidates)
    deadline = max(chosen.invoked.deadline_s or 0.0, AMPLE_S)
    status, retry = numbers.choice((("UNAVAILABLE", None), ("RESOURCE_EXHAUSTED", 1000), ("DEADLINE_EXCEEDED", None)))
    began, end = chosen.calls[0].began, chosen.invoked.at + deadline
    refused = Request(replace(chosen.invoked, deadline_s=deadline))
    for number, when, said, wait in ((0, began.at, "UNAVAILABLE", None), (1, end, status, retry)):
        ended = Ended(chosen.id, number, when, said, retry_after_ms=wait)
        refused.calls.append(Call(Called(chosen.id, number, began.at, GENERATE, began.target), ended=ended))
    broker = run.broker
    jobs = {name: job for name, job in broker.jobs.items() if name != chosen.id}
    logs = {name: log for name, log in broker.logs.items() if name != chosen.id}
    keys = {name: key for name, key in broker.keys.items() if name not in (f"job:{chosen.id}", f"log:{chosen.id}")}
    return put(replace(run, broker=replace(broker, jobs=jobs, logs=logs, keys=keys)), refused)


CHANGES: Final[tuple[tuple[str, Callable[[Run, random.Random], Run | None]], ...]] = (
    ("I1", double_finish),
    ("I1", token_after_the_end),
    ("I1", missing_finish),
    ("I1", ends_in_two_ways),
    ("I1", lost_request),
    ("I1", hanging_call),
    ("I1", late_end),
    ("I1", output_after_a_cancel),
    ("I7", error_of_the_wrong_class),
    ("I7", bad_input_breaks_something),
    ("I7", overload_without_retry_info),
    ("I7", no_service_afterwards),
    ("I7", refused_for_ever),
)


def _refused_first(run: Run, numbers: random.Random, status: str) -> Run | None:
    """With one more call before the others, which ended at once."""
    candidates = [*of_role(run, LOAD), *of_role(run, PROBE)]
    if not candidates:
        return None
    request = copied(numbers.choice(candidates))
    first = request.calls[0].began
    request.calls.insert(0, Call(first, ended=Ended(request.id, first.call, first.at, status)))
    return put(run, request)
