"""When nobody could be served, by what was done to the fleet: the only excuse for UNAVAILABLE to the end. Pure.

What was done, and not what was seen: a fleet that stays away longer than its faults last has no excuse.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

from bench.chaos.evidence import Outage
from bench.chaos.schedule import BROKER, NATURES, WORKER, Kind, recovery_s

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bench.chaos.evidence import Run
    from bench.chaos.history import Call
    from bench.chaos.nemesis import Struck
    from bench.chaos.schedule import Plan

AWAY_S: Final = 30.0
"""For so long an accepted job waits for a worker, and a caller for the broker."""
SLACK_S: Final = 2.0
"""By so much the service and the nemesis may disagree on when an outage began or ended."""
_BROKER_AWAY: Final = frozenset(
    {Kind.BROKER_KILL, Kind.BROKER_TORN, Kind.BROKER_LOSS, Kind.BROKER_PAUSE, Kind.BROKER_CUT}
)

Span = tuple[float, float]


def outages(struck: Iterable[Struck], plan: Plan, began_at: float) -> tuple[Outage, ...]:
    """Those of AWAY_S or more: no worker was there, or the broker was not. ``began_at``: when the nemesis began, by the
    history's clock."""
    spans: dict[str, list[Span]] = {name: [] for name in (*plan.workers, BROKER)}
    for each in struck:
        nature = NATURES[each.fault.kind]
        if each.done and (nature.scope == WORKER or each.fault.kind in _BROKER_AWAY):
            spans[each.fault.target].append((each.at_s, each.healed_s + recovery_s(nature, plan)))
    long = [(begin, end) for begin, end in _away(spans, plan.workers) if end - begin >= AWAY_S]
    return tuple(Outage(began_at + begin, began_at + end) for begin, end in long)


def _away(spans: dict[str, list[Span]], workers: tuple[str, ...]) -> list[Span]:
    """When the broker was away, or all workers were; spans that touch are one."""
    edges = sorted({edge for each in spans.values() for span in each for edge in span})
    found: list[Span] = []
    for begin, end in pairwise(edges):
        away = {name for name, each in spans.items() if any(one <= begin and end <= other for one, other in each)}
        if BROKER in away or (workers and away >= set(workers)):
            before = found.pop() if found and found[-1][1] == begin else (begin, begin)
            found.append((before[0], end))
    return found


def excused(call: Call, run: Run) -> bool:
    """Whether it ended with UNAVAILABLE where it might."""
    if call.ended is None or call.status != "UNAVAILABLE":
        return False
    at = call.ended.at
    return any(one.begin + AWAY_S - SLACK_S <= at <= one.end + SLACK_S for one in run.outages)
