"""Lies about the tokens, texts and counts that clients saw; see ``mutations``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from bench.chaos.places import at, is_whole, last_calls, with_tokens

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from bench.chaos.evidence import Run
    from bench.chaos.history import Call, Request

OTHER: Final = 7_777_777
"""A token that no answer has."""


def dropped_tokens(run: Run, numbers: random.Random) -> Run | None:
    """A chunk is not there, the next ones are as they were."""

    def places(request: Request) -> Iterator[tuple[Call, int]]:
        for call, index, chunk in with_tokens(request):
            later = (other for other in call.chunks[index + 1 :] if other.choice == chunk.choice and other.tokens)
            if any(later):
                yield call, index

    return at(run, numbers, places, lambda call, index: call.chunks.pop(index))


def repeated_tokens(run: Run, numbers: random.Random) -> Run | None:
    """A chunk comes twice."""

    def places(request: Request) -> Iterator[tuple[Call, int]]:
        return ((call, index) for call, index, chunk in with_tokens(request) if not chunk.finish)

    return at(run, numbers, places, lambda call, index: call.chunks.insert(index, call.chunks[index]))


def changed_token(run: Run, numbers: random.Random) -> Run | None:
    """Another token than without faults."""

    def change(call: Call, index: int) -> None:
        tokens = list(call.chunks[index].tokens)
        tokens[numbers.randrange(len(tokens))] = OTHER
        call.chunks[index] = replace(call.chunks[index], tokens=tuple(tokens))

    return at(run, numbers, lambda request: ((call, index) for call, index, _ in with_tokens(request)), change)


def lost_token_hidden(run: Run, numbers: random.Random) -> Run | None:
    """A token is not there, and indexes and usage say that it never was, as after a wrong resume."""

    def places(request: Request) -> Iterator[tuple[Call, int]]:
        if is_whole(request) and len(request.streams) == 1:
            yield from ((call, index) for call, index, _ in with_tokens(request))

    def change(call: Call, index: int) -> None:
        choice = call.chunks[index].choice
        call.chunks[index] = replace(call.chunks[index], tokens=call.chunks[index].tokens[1:])
        for later in range(index + 1, len(call.chunks)):
            if call.chunks[later].choice == choice:
                call.chunks[later] = replace(call.chunks[later], start=call.chunks[later].start - 1)
        if call.usage is not None:
            call.usage = replace(call.usage, completion=call.usage.completion - 1)

    return at(run, numbers, places, change)


def changed_text(run: Run, numbers: random.Random) -> Run | None:
    """Right tokens, wrong text."""

    def places(request: Request) -> Iterator[tuple[Call, int]]:
        if is_whole(request):
            call = request.streams[-1]
            if not call.began.after:
                yield from ((call, index) for index, chunk in enumerate(call.chunks) if chunk.text)

    def change(call: Call, index: int) -> None:
        call.chunks[index] = replace(
            call.chunks[index], text=call.chunks[index].text[:-1] + "\N{REPLACEMENT CHARACTER}"
        )

    return at(run, numbers, places, change)


def usage_counts_twice(run: Run, numbers: random.Random) -> Run | None:
    """What was resumed is counted again."""

    def change(call: Call, _: int) -> None:
        assert call.usage is not None
        call.usage = replace(call.usage, completion=call.usage.completion + 1)

    return at(run, numbers, last_calls, change)


def uncounted_attempt(run: Run, numbers: random.Random) -> Run | None:
    """A worker took over, and usage does not tell."""

    def places(request: Request) -> Iterator[tuple[Call, int]]:
        attempts = [entry.attempt for entry in run.broker.logs.get(request.id, ())]
        usages = [call for call in request.streams if call.usage is not None]
        if max(attempts, default=0) > 1 and len(usages) == 1:
            yield usages[0], 0

    def change(call: Call, _: int) -> None:
        assert call.usage is not None
        call.usage = replace(call.usage, attempts=1)

    return at(run, numbers, places, change)


CHANGES: Final[tuple[tuple[str, Callable[[Run, random.Random], Run | None]], ...]] = (
    ("I2", dropped_tokens),
    ("I2", repeated_tokens),
    ("I3", changed_token),
    ("I3", lost_token_hidden),
    ("I2", changed_text),
    ("I2", usage_counts_twice),
    ("I2", uncounted_attempt),
)
