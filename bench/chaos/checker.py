"""Whether a run kept the seven promises: all violations of I1 to I7, and the run's figures. Pure.

::

    findings = check(run, Rules(lossless=True))
    print(told(findings))
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from bench.chaos.codes import check_codes
from bench.chaos.evidence import Answer, Choice, Rules, Run
from bench.chaos.history import BAD, MERGED
from bench.chaos.remains import check_log, check_log_tokens, check_remains
from bench.chaos.streams import accepted, check_answer, check_ends, check_streams, seen_of, timed_out

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from bench.chaos.findings import Finding
    from bench.chaos.history import Request
    from bench.chaos.streams import Seen


class NoOracle(Exception):  # noqa: N818 - says what is missing
    """There is no answer without faults to compare with: the harness is wrong, not the service."""


def check(run: Run, rules: Rules) -> list[Finding]:
    """All violations, each once, in order. Raises NoOracle."""
    found: set[Finding] = set()
    for request in run.requests.values():
        found.update(_check_request(request, run, rules))
    for request_id, log in run.broker.logs.items():
        job = run.broker.jobs.get(request_id)
        found.update(check_log(request_id, log, job.choices if job else 1))
    found.update(check_remains(run, rules))
    return sorted(found)


def _check_request(request: Request, run: Run, rules: Rules) -> Iterator[Finding]:
    yield from check_streams(request)
    yield from check_ends(request, run, rules)
    yield from check_codes(request, run, rules)
    if request.invoked.role == BAD:
        return
    oracle = run.oracle.get(request.invoked.digest)
    if oracle is None:
        raise NoOracle(f"request {request.id}: payload {request.invoked.digest} was not asked without faults")
    yield from check_answer(request, oracle, rules)
    if log := run.broker.logs.get(request.id):
        yield from check_log_tokens(request, log, oracle, rules)


def oracle_of(requests: Iterable[Request]) -> dict[str, Answer]:
    """The answers of a run without faults, by digest. Raises NoOracle for one that did not end well at the first call,
    or when one payload was answered in two ways."""
    answers: dict[str, Answer] = {}
    for request in requests:
        if request.invoked.role == BAD:
            continue
        seen, calls = seen_of(request), request.streams
        whole = all(one.whole and len(one.finishes) == 1 for one in seen)
        if len(calls) != 1 or calls[0].status != "OK" or calls[0].usage is None or not whole:
            raise NoOracle(f"request {request.id} was not answered: {[call.status for call in calls]}")
        tokens = [tuple(one.tokens[index] for index in sorted(one.tokens)) for one in seen]
        choices = tuple(Choice(ids, one.text, one.finish) for ids, one in zip(tokens, seen, strict=True))
        answer = Answer(choices, calls[0].usage.prompt)
        if answers.setdefault(request.invoked.digest, answer) != answer:
            raise NoOracle(f"request {request.id}: payload {request.invoked.digest} has two answers without any fault")
    return answers


@dataclass(frozen=True, slots=True)
class Figures:
    """A run in numbers."""

    requests: int = 0
    accepted: int = 0
    finished: int = 0
    """With all choices whole."""
    cancelled: int = 0
    refused: int = 0
    """Never accepted; bad ones are not among them."""
    merged: int = 0
    """Asked for by the product's client."""
    reattached: int = 0
    """Took more than one call."""
    resumed: int = 0
    """More than one attempt."""
    rehomed: int = 0
    """Jobs that gateways moved to another worker, as far as their last scrapes tell."""
    resubmitted: int = 0
    """Jobs that gateways submitted again, because the broker had lost them; likewise."""
    fenced: int = 0
    """Writes that came too late, and were refused; likewise, of workers."""
    tokens: int = 0
    failed: int = 0
    """Accepted, and ended by an error."""
    expired: int = 0
    """Accepted, and not finished when their own deadlines came."""
    lost: int = 0
    """Accepted, without an end, or failed where that is not allowed."""
    repeated: int = 0
    """Requests and logs with a token that came twice, or an end that did."""
    differing: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


_OF: Mapping[str, frozenset[tuple[str, str]]] = {
    "lost": frozenset({("I1", "lost"), ("I1", "failed"), ("I1", "hang"), ("I1", "no end")}),
    "repeated": frozenset({("I2", "repeat"), ("I1", "second end"), ("I1", "two ends"), ("I2", "late attempt")}),
    "differing": frozenset({("I3", "differs"), ("I3", "ends elsewhere")}),
}


REHOMED: Final = 'octavo_rehomed_total{outcome="moved"}'
RESUBMITTED: Final = "octavo_resubmitted_total"
FENCED: Final = "octavo_fenced_total"


def counted(run: Run, name: str) -> int:
    """Of a counter, the sum over all lives of all processes, as each was scraped last."""
    return round(sum(pages[-1].counters.get(name, 0.0) for pages in run.scrapes.values() if pages))


def _is_cancelled(request: Request, seen: Sequence[Seen]) -> bool:
    """Whether it was ended by its client, who may have left without waiting for the end."""
    left = any(call.status == "CANCELLED" for call in request.streams) and not all(one.whole for one in seen)
    return left or any(one.finish == "CANCELLED" for one in seen)


def figures(run: Run, findings: Sequence[Finding]) -> Figures:
    """What is told at the end of a run."""
    good = [request for request in run.requests.values() if request.invoked.role != BAD]
    taken = [request for request in good if accepted(request, run)]
    seen = {request.id: seen_of(request) for request in good}
    used = {request.id: [call.usage.attempts for call in request.streams if call.usage] for request in good}
    by_kind = {name: {each.where for each in findings if (each.invariant, each.name) in of} for name, of in _OF.items()}
    return Figures(
        requests=len(good),
        accepted=len(taken),
        finished=sum(all(one.whole for one in seen[request.id]) for request in taken),
        cancelled=sum(_is_cancelled(request, seen[request.id]) for request in taken),
        refused=len(good) - len(taken),
        merged=sum(request.streams[0].began.verb == MERGED for request in good if request.streams),
        reattached=sum(len(request.streams) > 1 for request in good),
        resumed=sum(max(attempts, default=0) > 1 for attempts in used.values()),
        rehomed=counted(run, REHOMED),
        resubmitted=counted(run, RESUBMITTED),
        fenced=counted(run, FENCED),
        failed=sum(any(one.finish == "ERROR" for one in seen[request.id]) for request in taken),
        expired=sum(timed_out(request) and not all(one.whole for one in seen[request.id]) for request in taken),
        tokens=sum(len(one.tokens) for each in seen.values() for one in each),
        **{name: len(where) for name, where in by_kind.items()},
    )
