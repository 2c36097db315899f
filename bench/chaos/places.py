"""Where mutations find a place for their lies, and how they put them there; see ``mutations``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bench.chaos.history import LOAD, PROBE, Call, Request
from bench.chaos.streams import seen_of

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from bench.chaos.evidence import Run
    from bench.chaos.history import Came


def at(
    run: Run,
    numbers: random.Random,
    places: Callable[[Request], Iterator[tuple[Call, int]]],
    change: Callable[[Call, int], object],
) -> Run | None:
    """The run with a change at one of the places that ``places`` finds in its requests (a call, and an index in it)."""
    found = [
        (request, request.calls.index(call), index)
        for request in [*of_role(run, LOAD), *of_role(run, PROBE)]
        for call, index in places(request)
    ]
    if not found:
        return None
    request, number, index = numbers.choice(found)
    request = copied(request)
    change(request.calls[number], index)
    return put(run, request)


def with_tokens(request: Request) -> Iterator[tuple[Call, int, Came]]:
    for call in request.streams:
        yield from ((call, index, chunk) for index, chunk in enumerate(call.chunks) if chunk.tokens)


def last_calls(request: Request) -> Iterator[tuple[Call, int]]:
    """The one that ended well, when one did."""
    if is_whole(request) and request.streams[-1].usage is not None:
        yield request.streams[-1], 0


def is_whole(request: Request) -> bool:
    """Whether its last stream ended it well."""
    return bool(request.streams) and request.streams[-1].status == "OK" and all(one.whole for one in seen_of(request))


def of_role(run: Run, role: str) -> list[Request]:
    return [request for request in run.requests.values() if request.invoked.role == role]


def copied(request: Request) -> Request:
    return Request(request.invoked, [Call(one.began, list(one.chunks), one.usage, one.ended) for one in request.calls])


def put(run: Run, request: Request) -> Run:
    return replace(run, requests={**run.requests, request.id: request})
