"""Runs without any violation, made up from a seed: what the checker must find nothing in, and mutations start from.

They have what real runs have: answers of several choices in chunks of one token or more, text that lags, calls that are
cut off and gone on with (from the start, or from where they were), refusals, cancels, deadlines, bad input and probes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from bench.chaos.evidence import Answer, Choice, JobFacts, Key, LogEntry, Pool, Run, Scrape, Snapshot, Stream
from bench.chaos.history import (
    ATTACH,
    BAD,
    CANCEL,
    GENERATE,
    LOAD,
    PROBE,
    Call,
    Called,
    Came,
    Ended,
    Invoked,
    Request,
    Used,
)
from bench.chaos.remains import HITS, QUERIES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STORIES: Final = ("plain", "cut", "refused at first", "refused", "cancelled", "too late", "bad", "probe")
"""What may happen to a request. Each run has each of them."""
SHORT: Final = ("refused", "too late")
"""What may only happen to who has not much time."""
DEADLINES_S: Final = (30.0, 120.0)
"""Of these, and of all others."""
TTL_MS: Final = 500_000


def decode(tokens: Sequence[int]) -> str:
    """The text of made-up tokens."""
    return "".join(f"<{token}>" for token in tokens)


def made_up(seed: int, requests: int = 16) -> Run:
    """A good run; at least one request of each story, so never fewer than there are stories."""
    numbers = random.Random(seed)
    oracle = {f"payload-{index}": _answer(numbers) for index in range(4)}
    stage = _Stage(numbers, oracle)
    stories = [*STORIES, *numbers.choices(STORIES, k=max(0, requests - len(STORIES)))]
    numbers.shuffle(stories)
    for index, story in enumerate(stories):
        stage.add(f"r{index}", story)
    return stage.run()


def _answer(numbers: random.Random) -> Answer:
    choices = []
    for _ in range(numbers.choice((1, 1, 1, 2, 3))):
        # Few tokens, so that a shifted answer is like itself for a while, as real ones are.
        tokens = tuple(numbers.choices(range(10, 16), k=numbers.randint(4, 14)))
        choices.append(Choice(tokens, decode(tokens), numbers.choice(("STOP", "LENGTH"))))
    return Answer(tuple(choices), prompt_tokens=numbers.randint(1, 50))


@dataclass(frozen=True, slots=True)
class _Piece:
    """A chunk, of whatever request."""

    choice: int
    start: int
    tokens: tuple[int, ...]
    text: str
    finish: str


def _pieces(numbers: random.Random, answer: Answer) -> list[_Piece]:
    """The whole answer, choices mixed, text behind its tokens."""
    lines: list[list[_Piece]] = []
    for index, choice in enumerate(answer.choices):
        line, start, held = [], 0, ""
        while start < len(choice.tokens):
            tokens = choice.tokens[start : start + numbers.choice((1, 1, 1, 2, 3))]
            last = start + len(tokens) == len(choice.tokens)
            held += decode(tokens)
            shown = held if last or numbers.random() < 0.7 else ""
            held = held[len(shown) :]
            line.append(_Piece(index, start, tokens, shown, choice.finish if last else ""))
            start += len(tokens)
        lines.append(line)
    mixed: list[_Piece] = []
    while any(lines):
        mixed.append(numbers.choice([line for line in lines if line]).pop(0))
    return mixed


class _Stage:
    """Takes requests in, and what they leave in the broker."""

    def __init__(self, numbers: random.Random, oracle: dict[str, Answer]) -> None:
        self.numbers = numbers
        self.oracle = oracle
        self.requests: dict[str, Request] = {}
        self.jobs: dict[str, JobFacts] = {}
        self.logs: dict[str, tuple[LogEntry, ...]] = {}
        self.ends = {"finished": 0, "cancelled": 0, "expired": 0}
        self.now = 100.0

    def add(self, request_id: str, story: str) -> None:
        digest = self.numbers.choice(sorted(self.oracle))
        answer = self.oracle[digest]
        self.pieces = _pieces(self.numbers, answer)
        self.attempts = self.numbers.choice((2, 3)) if story == "cut" else 1
        role = {"bad": BAD, "probe": PROBE}.get(story, LOAD)
        self.request = Request(
            Invoked(
                *(request_id, self._tick(), digest, self.numbers.choice(("greedy", "seeded")), len(answer.choices)),
                role=role,
                deadline_s=DEADLINES_S[story not in SHORT],
                expect="INVALID_ARGUMENT" if role == BAD else "",
            )
        )
        tell: dict[str, Callable[[Answer], None]] = {
            "cut": self._cut,
            "refused at first": self._refused_at_first,
            "refused": lambda _: self._refuse(),
            "cancelled": self._cancelled,
            "too late": self._too_late,
            "bad": lambda _: self._end(self._call(), "INVALID_ARGUMENT", message="max_tokens is 0"),
        }
        tell.get(story, self._plain)(answer)
        self.requests[request_id] = self.request

    def run(self) -> Run:
        keys = {f"{kind}:{request}": Key("hash", TTL_MS) for request in self.jobs for kind in ("job", "log")}
        keys |= {"workers": Key("zset", None), "worker:w0": Key("hash", 2500), "jobs:w0": Key("stream", None)}
        tokens = sum(len(entry.tokens) for log in self.logs.values() for entry in log)
        lives = {"g0": ("octavo_streams", "octavo_refills_total"), "w0": ("octavo_running", "octavo_steps_total")}
        scrapes = {
            life: tuple(
                Scrape(
                    {gauge: 0.0 if share == 3 else 1.0}, {total: tokens * share / 3, HITS: share, QUERIES: 2 * share}
                )
                for share in range(4)
            )
            for life, (gauge, total) in lives.items()
        }
        snapshot = Snapshot(
            keys,
            streams={"w0": Stream(0, 0), "w1": Stream(0, 0)},
            jobs=self.jobs,
            logs=self.logs,
            ledger={"accepted": sum(self.ends.values()), "in_flight": 0, "failed": 0, "dead": 0, **self.ends},
        )
        pools = (Pool("w0", 64, 10, 54, 0), Pool("w1", 64, 64, 0, 0))
        return Run(self.requests, self.oracle, snapshot, pools, scrapes)

    def _plain(self, answer: Answer) -> None:
        self._deliver(self._call(), self.pieces, answer)
        self._keep(self.pieces)

    def _refused_at_first(self, answer: Answer) -> None:
        self._refuse()
        self._plain(answer)

    def _refuse(self) -> None:
        self._end(self._call(), "UNAVAILABLE", message="no live worker")
        self._end(self._call(), "RESOURCE_EXHAUSTED", message="every queue is full", retry_after_ms=1000)

    def _cut(self, answer: Answer) -> None:
        """One to three times, at any chunk; gone on with from there, or from the start."""
        log, place = self.pieces, self.numbers.randrange(len(self.pieces))
        self._deliver(self._call(), log[:place])
        for _ in range(self.numbers.randrange(3)):
            more = self.numbers.randrange(place, len(log))
            place = self._go_on(place, more, None)
        self._go_on(place, len(log), answer)
        self._keep(log)

    def _go_on(self, place: int, more: int, answer: Answer | None) -> int:
        """The next call: the log from ``place`` to ``more``, or all of it anew; where the client is then."""
        if self.numbers.random() < 0.5:
            self._deliver(self._call(), self.pieces[:more], answer)
            return more
        have: dict[int, int] = {}
        for piece in self.pieces[:place]:
            have[piece.choice] = piece.start + len(piece.tokens)
        self._deliver(self._call(have), self._ends_again(place) + self.pieces[place:more], answer)
        return max(place, more)

    def _ends_again(self, place: int) -> list[_Piece]:
        """The ends that the client knows already, without their tokens."""
        ended = [piece for piece in self.pieces[:place] if piece.finish]
        return [replace(piece, start=piece.start + len(piece.tokens), tokens=(), text="") for piece in ended]

    def _cancelled(self, answer: Answer) -> None:
        """After some tokens, before the last chunk of any choice."""
        unfinished = [number for number, piece in enumerate(self.pieces) if piece.finish]
        some = self.pieces[: self.numbers.randint(1, max(1, unfinished[0]))]
        some = [piece for piece in some if not piece.finish] or [replace(self.pieces[0], finish="")]
        stream = self._call()
        for piece in some:
            self._come(stream, piece)
        cancel = self._call(verb=CANCEL, target=stream.began.target)
        self._end(cancel, "OK", cancelled=True)
        for choice in range(len(answer.choices)):
            place = sum(len(piece.tokens) for piece in some if piece.choice == choice)
            self._come(stream, _Piece(choice, place, (), "", "CANCELLED"))
        self._end(stream, "OK")
        self._keep(some, outside="CANCELLED")

    def _too_late(self, _answer: Answer) -> None:
        """Its own deadline ends it."""
        some = self.pieces[: self.numbers.randrange(len(self.pieces))]
        some = [piece for piece in some if not piece.finish]
        stream = self._call()
        for piece in some:
            self._come(stream, piece)
        self.now = self.request.invoked.at + DEADLINES_S[0] + 0.1
        self._end(stream, "DEADLINE_EXCEEDED", message="Deadline Exceeded")
        self._keep(some, outside="ERROR")

    def _call(self, after: dict[int, int] | None = None, verb: str = "", target: str = "") -> Call:
        calls = self.request.calls
        verb = verb or (ATTACH if calls and after is not None else GENERATE)
        target = target or f"127.0.0.1:{self.numbers.choice((5001, 5002))}"
        call = Call(Called(self.request.id, len(calls), self._tick(), verb, target, after or {}))
        calls.append(call)
        return call

    def _deliver(self, call: Call, pieces: Sequence[_Piece], answer: Answer | None = None) -> None:
        """With an answer: to the end. Without: cut off after these."""
        for piece in pieces:
            self._come(call, piece)
        if answer is None:
            self._end(call, "UNAVAILABLE", message="Socket closed")
            return
        total = sum(len(choice.tokens) for choice in answer.choices)
        call.usage = Used(self.request.id, call.began.call, self.now, answer.prompt_tokens, 0, total, self.attempts)
        self._end(call, "OK")

    def _come(self, call: Call, piece: _Piece) -> None:
        chunk = (piece.choice, piece.start, piece.tokens, piece.text, piece.finish)
        call.chunks.append(Came(self.request.id, call.began.call, self._tick(), *chunk))

    def _end(
        self, call: Call, status: str, *, message: str = "", retry_after_ms: int | None = None, cancelled: bool = False
    ) -> None:
        told = (status, message, retry_after_ms, cancelled)
        call.ended = Ended(self.request.id, call.began.call, self._tick(), *told)

    def _keep(self, pieces: Sequence[_Piece], outside: str = "") -> None:
        """What the broker has of it: attempts follow on each other anywhere in the log."""
        borders = sorted(self.numbers.randrange(len(pieces)) for _ in range(self.attempts - 1))
        log = []
        for number, piece in enumerate(pieces):
            attempt = 1 + sum(border <= number for border in borders)
            log.append(LogEntry(attempt, piece.choice, piece.start, piece.tokens, piece.finish))
        if outside:
            log.append(LogEntry(0, 0, 0, (), outside))
        self.logs[self.request.id] = tuple(log)
        self.jobs[self.request.id] = JobFacts("ended", self.attempts, self.request.invoked.n)
        self.ends[{"CANCELLED": "cancelled", "ERROR": "expired"}.get(outside, "finished")] += 1

    def _tick(self) -> float:
        self.now += self.numbers.uniform(0.001, 0.02)
        return self.now
