"""Checks of one request: what its calls brought, chunk by chunk, and how it ended. Pure.

I1 (ends), I2 (indexes, text, usage) and I3 (the same as without faults).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from bench.chaos.findings import Finding
from bench.chaos.history import BAD, CANCEL, PROBE
from bench.chaos.outages import excused

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.chaos.evidence import Answer, Rules, Run
    from bench.chaos.history import Call, Came, Request

WHOLE: Final = frozenset({"STOP", "LENGTH"})
"""Finishes of an answer that is all there."""


@dataclass(slots=True)
class Seen:
    """What one choice of a request came to, over all of its calls."""

    tokens: dict[int, int] = field(default_factory=dict)
    """By index; of the first call that brought it."""
    texts: list[str] = field(default_factory=lambda: [""])
    """Of each call that began at the start, with those that went on from it."""
    finishes: list[str] = field(default_factory=list)
    """Different ones, in order: one, when all is well."""

    @property
    def text(self) -> str:
        """The longest."""
        return max(self.texts, key=len)

    @property
    def finish(self) -> str:
        return self.finishes[-1] if self.finishes else ""

    @property
    def whole(self) -> bool:
        return self.finish in WHOLE


def seen_of(request: Request) -> list[Seen]:
    """Of each choice, in order. Chunks of choices that the request does not have are left out."""
    seen = [Seen() for _ in range(request.invoked.n)]
    for call in request.streams:
        for choice, one in enumerate(seen):
            if not call.began.after.get(choice, 0) and any(chunk.choice == choice for chunk in call.chunks):
                one.texts.append("")
        for chunk in up_to_ends(call):
            if 0 <= chunk.choice < len(seen):
                _take(seen[chunk.choice], chunk)
    return seen


def up_to_ends(call: Call) -> Iterator[Came]:
    """Its chunks, without those that came behind the end of their choice: these are told once, as such."""
    ended: set[int] = set()
    for chunk in call.chunks:
        if chunk.choice not in ended:
            yield chunk
        if chunk.finish:
            ended.add(chunk.choice)


def _take(one: Seen, chunk: Came) -> None:
    for offset, token in enumerate(chunk.tokens):
        one.tokens.setdefault(chunk.start + offset, token)
    one.texts[-1] += chunk.text
    if chunk.finish and chunk.finish not in one.finishes:
        one.finishes.append(chunk.finish)


def accepted(request: Request, run: Run) -> bool:
    """Whether the service took it on: a client saw output or an OK, or the broker knows the job."""
    shown = any(call.chunks or call.status == "OK" for call in request.streams)
    return shown or request.id in run.broker.jobs


def timed_out(request: Request) -> bool:
    """Whether it was its own deadline that ended it."""
    deadline, last = request.invoked.deadline_s, request.streams[-1].ended if request.streams else None
    return deadline is not None and last is not None and last.at - request.invoked.at >= deadline - 0.1


def is_ample(request: Request, rules: Rules) -> bool:
    """Whether there was time for it, whatever happened meanwhile."""
    deadline = request.invoked.deadline_s
    return deadline is not None and deadline >= rules.ample_s


def check_streams(request: Request) -> Iterator[Finding]:
    """Each call by itself: indexes go on from where they should, one end per choice, nothing behind it."""
    for number, call in enumerate(request.streams):
        where = f"{request.id} call {number}"
        following: dict[int, int] = dict(call.began.after)
        finishes: dict[int, str] = {}
        for chunk in call.chunks:
            choice = f"choice {chunk.choice}"
            if not 0 <= chunk.choice < request.invoked.n:
                yield Finding("I2", "no such choice", where, f"a chunk of {choice}, of {request.invoked.n}")
                continue
            if (before := finishes.get(chunk.choice)) is not None:
                name = "second end" if chunk.finish else "output behind the end"
                yield Finding("I1", name, where, f"{choice}: a chunk at {chunk.start} behind its {before}")
                continue
            yield from _placed(where, chunk, following)
            if chunk.finish:
                finishes[chunk.choice] = chunk.finish
        open_choices = [choice for choice in range(request.invoked.n) if choice not in finishes]
        if call.status == "OK" and open_choices:
            yield Finding("I1", "no end", where, f"OK, and no end of choices {open_choices}")


def _placed(where: str, chunk: Came, following: dict[int, int]) -> Iterator[Finding]:
    expected = following.get(chunk.choice, 0)
    # An end from outside has no tokens and, as the log has it, no place either.
    if chunk.start != expected and (chunk.tokens or chunk.finish in WHOLE):
        name = "gap" if chunk.start > expected else "repeat"
        yield Finding("I2", name, where, f"choice {chunk.choice}: a chunk at {chunk.start}, {expected} is next")
    following[chunk.choice] = max(expected, chunk.start + len(chunk.tokens))


def check_ends(request: Request, run: Run, rules: Rules) -> Iterator[Finding]:
    """An accepted request has one end for each choice, of a kind that is right, in time."""
    yield from _check_times(request, rules)
    seen = seen_of(request)
    for choice, one in enumerate(seen):
        if len(one.finishes) > 1:
            yield Finding("I1", "two ends", request.id, f"choice {choice}: {' and '.join(one.finishes)}")
    if request.invoked.role in (BAD, PROBE) or not accepted(request, run):
        return
    cancelled = request.cancelled_at is not None
    missing = [choice for choice, one in enumerate(seen) if not one.finishes]
    said = " ".join(call.status or "open" for call in request.streams)
    if timed_out(request):
        if is_ample(request, rules) and not cancelled and not all(one.whole for one in seen):
            yield Finding("I1", "expired", request.id, f"met its deadline after calls: {said}")
        return
    # A client that cancels may leave without waiting for the end.
    ok_before = any(call.status == "OK" for call in request.streams)  # told by check_streams
    if missing and not cancelled and not ok_before:
        yield Finding("I1", "lost", request.id, f"no end of choices {missing} after calls: {said}")
    by_outage = excused(request.streams[-1], run)
    for choice, one in enumerate(seen):
        if one.finish == "CANCELLED" and not cancelled:
            yield Finding("I1", "cancelled unasked", request.id, f"choice {choice}")
        if one.finish == "ERROR" and rules.lossless and len(one.finishes) == 1 and not by_outage:
            yield Finding("I1", "failed", request.id, f"choice {choice} after calls: {said}")


def _check_times(request: Request, rules: Rules) -> Iterator[Finding]:
    invoked = request.invoked
    for number, call in enumerate(request.calls):
        where = f"{request.id} call {number}"
        if call.ended is None:
            yield Finding("I1", "hang", where, f"open when the run was over, on {call.began.target}")
        elif invoked.deadline_s is not None and call.ended.at > invoked.at + invoked.deadline_s + rules.late_s:
            took = call.ended.at - invoked.at
            yield Finding("I1", "late", where, f"ended after {took:.1f} s, its deadline was {invoked.deadline_s:g} s")
    for call in request.streams:
        # Through another gateway, that stood still meanwhile, what was there before the cancel may come late.
        told = cancelled_by(request, call.began.target)
        late = [chunk for chunk in call.chunks if told and chunk.tokens and chunk.at > told + rules.cancel_s]
        # Asked for anew, what there was before is replayed.
        if told and late and call.began.at < told:
            yield Finding("I1", "output after a cancel", request.id, f"tokens came {late[0].at - told:.1f} s after it")


def cancelled_by(request: Request, target: str) -> float | None:
    """When that gateway answered that it had ended the request; None: it did not."""
    cancels = [call.ended for call in request.calls if (call.began.verb, call.began.target) == (CANCEL, target)]
    return min((ended.at for ended in cancels if ended and ended.cancelled), default=None)


def check_answer(request: Request, oracle: Answer, rules: Rules) -> Iterator[Finding]:
    """What came is what comes without faults: tokens (I3), text and usage (I2)."""
    if request.invoked.n != len(oracle.choices):
        raise ValueError(f"{request.id} has {request.invoked.n} choices, without faults it had {len(oracle.choices)}")
    seen = seen_of(request)
    for choice, one in enumerate(seen):
        wrong = list(_same_tokens(request, choice, one, oracle))
        # Whether the text of wrong tokens is theirs is no question any more.
        yield from wrong or _same_text(request, choice, one, oracle, rules)
    used = next((call.usage for call in reversed(request.streams) if call.usage), None)
    if used is None or not all(one.whole for one in seen):
        return
    counted = sum(len(one.tokens) for one in seen)
    if used.completion != counted:
        yield Finding("I2", "usage", request.id, f"{used.completion} tokens told, {counted} came")
    if used.prompt != oracle.prompt_tokens:
        yield Finding("I2", "usage", request.id, f"{used.prompt} prompt tokens told, of {oracle.prompt_tokens}")


def _same_tokens(request: Request, choice: int, one: Seen, oracle: Answer) -> Iterator[Finding]:
    right = oracle.choices[choice]
    for call in request.streams:
        if (wrong := _first_difference(call, choice, right.tokens)) is not None:
            index, token = wrong
            instead = right.tokens[index] if index < len(right.tokens) else "the end"
            yield Finding("I3", "differs", request.id, f"choice {choice}: token {index} is {token}, not {instead}")
            return
    if not one.whole or len(one.finishes) > 1:
        return
    length = max(one.tokens, default=-1) + 1
    if (length, one.finish) != (len(right.tokens), right.finish):
        ends = f"{one.finish} after {length} tokens, not {right.finish} after {len(right.tokens)}"
        yield Finding("I3", "ends elsewhere", request.id, f"choice {choice}: {ends}")


def _first_difference(call: Call, choice: int, right: tuple[int, ...]) -> tuple[int, int] | None:
    """Index and token. Only what came is compared, where it says it belongs: gaps and repeats are another matter."""
    for chunk in up_to_ends(call):
        if chunk.choice == choice:
            for index, token in enumerate(chunk.tokens, chunk.start):
                if index >= len(right) or right[index] != token:
                    return index, token
    return None


def _same_text(request: Request, choice: int, one: Seen, oracle: Answer, rules: Rules) -> Iterator[Finding]:
    right = oracle.choices[choice]
    tokens = [one.tokens[index] for index in sorted(one.tokens)]
    where = f"choice {choice}"
    if sorted(one.tokens) != list(range(len(tokens))):
        if one.whole:
            yield Finding("I2", "hole", request.id, f"{where}: {len(tokens)} tokens came, up to {max(one.tokens)}")
        return
    if len(one.finishes) > 1:
        return  # told already
    for text in one.texts:
        if not one.text.startswith(text):
            yield Finding("I2", "text", request.id, f"{where}: calls gave {text[-40:]!r} and {one.text[-40:]!r}")
            return
    if one.whole and tuple(tokens) == right.tokens:
        if one.text != right.text and one.finish == right.finish:
            says = f"{where}: {one.text[-40:]!r} at the end, not {right.text[-40:]!r}"
            yield Finding("I2", "text", request.id, says)
    elif rules.decode is not None:
        # A stop string and what is held back are not in the text.
        whole = rules.decode(tokens)
        if not whole.startswith(one.text):
            says = f"{where}: {one.text[-40:]!r} is not of its tokens: {whole[-40:]!r}"
            yield Finding("I2", "text", request.id, says)
