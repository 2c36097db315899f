"""What became of streams whose worker was struck: how soon they went on, and whether as without the fault. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from bench.chaos.silences import new_tokens_at
from bench.chaos.streams import seen_of
from bench.stats import percentile

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bench.chaos.findings import Finding
    from bench.chaos.history import Request

RANKS: Final = (50, 90, 99)
COLUMNS: Final = (
    *("scenario", "streams", "finished", "moved", "calls again", "errors", "recovery p50", "p90", "p99", "max"),
    *("late writes refused", "violations"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one scenario."""

    scenario: str
    struck: list[str]
    """What was done, as the nemesis tells it; empty when nobody could be struck."""
    streams: int
    finished: int
    """With all tokens, which are those of the run without faults unless a finding says otherwise."""
    moved: int
    """Run by more than one worker."""
    again: int
    """Took more than one call."""
    errors: int
    """Calls that ended otherwise than well."""
    recovery_s: dict[str, float]
    """The longest wait for a new token since the strike, of those that moved or were called for again; empty without
    any."""
    fenced: int
    """Writes of the struck worker that were refused afterwards, by its own count."""
    findings: list[Finding]
    expects_errors: bool = False
    """A gateway was struck, so that calls had to break."""
    expects_fenced: bool = False
    """A worker that had work wrote, while nothing of it arrived."""

    @property
    def passed(self) -> bool:
        whole = self.finished == self.streams and bool(self.struck) and not self.findings
        return whole and (self.expects_errors or not self.errors) and (not self.expects_fenced or self.fenced > 0)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "findings": [str(each) for each in self.findings], "passed": self.passed}

    def cells(self) -> tuple[str, ...]:
        """A line of the table; see COLUMNS."""
        ranks = (*(f"p{rank}" for rank in RANKS), "max")
        times = [f"{self.recovery_s[name]:.2f} s" if name in self.recovery_s else "-" for name in ranks]
        counts = (self.streams, self.finished, self.moved, self.again, self.errors)
        return (self.scenario, *map(str, counts), *times, str(self.fenced), str(len(self.findings)))


def attempts(request: Request) -> int:
    """How many workers have run it, as the last usage told; 0 without any."""
    return max((call.usage.attempts for call in request.streams if call.usage), default=0)


def recovery_s(request: Request, struck_at: float) -> float | None:
    """The longest that the client waited for a new token from then on, or from its first token on if that came later;
    None when none came. Not just for the next one: some of what its worker had said is still on its way when that is
    struck."""
    times = new_tokens_at(request)
    begins = max([struck_at, *times[:1]])
    later = [at for at in times if at > begins]
    return max((after - before for before, after in pairwise([begins, *later])), default=None)


def recoveries(requests: Iterable[Request], struck_at: float) -> dict[str, float]:
    """Of those that moved or were called for again, in seconds."""
    touched = [request for request in requests if attempts(request) > 1 or len(request.streams) > 1]
    found = [seconds for request in touched if (seconds := recovery_s(request, struck_at)) is not None]
    if not found:
        return {}
    return {**{f"p{rank}": round(percentile(found, rank), 3) for rank in RANKS}, "max": round(max(found), 3)}


def errors(requests: Iterable[Request]) -> int:
    """Calls that ended with another status than OK, or not at all."""
    return sum(call.status != "OK" for request in requests for call in request.streams)


def finished(requests: Sequence[Request]) -> int:
    """Those with all choices whole."""
    return sum(all(one.whole for one in seen_of(request)) for request in requests)
