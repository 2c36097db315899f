"""What `octavo top` tells of a fleet, from what was read of it now and before. Pure: no clock, no I/O.

Rates are differences of what workers count, by the broker's time between the two heartbeats that told it: hosts' clocks
and the time of reading do not matter. Another incarnation counts from zero, so it has no rates before its second
heartbeat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ops.ledger import ENDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    Row = dict[str, Any]

COUNTED: Final = ("steps", "busy_s", "computed_tokens", "output_tokens", "prefix_queried_tokens", "prefix_hit_tokens")
"""Fields of octavo.v1.Worker that only grow while an incarnation lives."""
GONE: Final = "gone"
"""The state of a worker of which only a queue is left."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was read at about one moment: octavo.v1.Worker, octavo.v1.Queue and octavo.v1.LedgerResponse as dicts."""

    workers: Sequence[Row]
    queues: Sequence[Row]
    ledger: Row


class Counts(NamedTuple):
    """What a worker had counted at one heartbeat, or between two."""

    seconds: float
    steps: float
    busy_s: float
    computed_tokens: float
    output_tokens: float
    queried: float
    hit: float


class Beats(NamedTuple):
    """A worker's last two heartbeats. ``before`` is None unless both are of this incarnation."""

    incarnation: str
    before: Counts | None
    now: Counts

    @property
    def between(self) -> Counts | None:
        """What was counted between them; None where that can't be told."""
        if self.before is None:
            return None
        grown = Counts(*(new - old for new, old in zip(self.now, self.before, strict=True)))
        return grown if grown.seconds > 0 and min(grown) >= 0 else None


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one worker, or of all together. None: not known (yet)."""

    worker: str
    state: str
    circuit: str
    model: str
    running: int
    waiting: int
    max_running: int
    undelivered: int
    """Jobs in its stream that it has not read yet; `pending`: that it has, and that have not ended."""
    pending: int
    oldest_s: float
    blocks_used: int
    blocks_cached: int
    blocks_total: int
    heartbeat_age_s: float | None
    output_tok_s: float | None = None
    computed_tok_s: float | None = None
    hit_rate: float | None = None
    """Of the prompt tokens looked up meanwhile."""
    step_ms: float | None = None
    busy: float | None = None
    """Share of the time that steps took."""


@dataclass(frozen=True, slots=True)
class View:
    """All that is shown."""

    workers: tuple[Figures, ...]
    total: Figures
    ledger: Row
    """With ``missing``: 0 when it adds up."""


def follow(history: Mapping[str, Beats], snapshot: Snapshot) -> dict[str, Beats]:
    """The last two heartbeats of each live worker. One that has not beaten since keeps those that it had."""
    return {worker["id"]: _followed(history.get(worker["id"]), worker) for worker in snapshot.workers}


def view(snapshot: Snapshot, beats: Mapping[str, Beats]) -> View:
    """``beats``: what ``follow`` has made of this snapshot and those before."""
    queues = {queue["worker"]: queue for queue in snapshot.queues}
    live = {worker["id"]: worker for worker in snapshot.workers}
    # A worker that is gone is told of as long as somebody waits for it.
    left = {name for name, queue in queues.items() if queue["undelivered"] or queue["pending"]} - live.keys()
    rows = [_figures(live[name], queues.get(name), beats[name]) for name in live]
    rows += [_remains(queues[name]) for name in left]
    rows.sort(key=lambda row: row.worker)
    between = [beats[name].between for name in live]
    missing = snapshot.ledger["accepted"] - sum(snapshot.ledger[name] for name in (*ENDS, "in_flight"))
    return View(tuple(rows), _total(rows, between), {**snapshot.ledger, "missing": missing})


def _followed(known: Beats | None, worker: Row) -> Beats:
    now = Counts(worker["heartbeat_unix_ms"] / 1000, *(worker[name] for name in COUNTED))
    if known is None or known.incarnation != worker["incarnation"]:
        return Beats(worker["incarnation"], None, now)
    if known.now.seconds == now.seconds:
        return known
    return Beats(known.incarnation, known.now, now)


def _figures(worker: Row, queue: Row | None, beats: Beats) -> Figures:
    return Figures(
        worker=worker["id"],
        state=worker["state"],
        circuit=worker["circuit"],
        model=worker["model"],
        running=worker["running"],
        waiting=worker["waiting"],
        max_running=worker["max_running"],
        **_queued(queue),
        blocks_used=worker["blocks_used"],
        blocks_cached=worker["blocks_cached"],
        blocks_total=worker["blocks_used"] + worker["blocks_cached"] + worker["blocks_free"],
        heartbeat_age_s=worker["heartbeat_age_ms"] / 1000,
        **_rates([beats.between]),
    )


def _remains(queue: Row) -> Figures:
    nothing = dict.fromkeys(
        ("running", "waiting", "max_running", "blocks_used", "blocks_cached", "blocks_total"),
        0,
    )
    return Figures(queue["worker"], GONE, circuit="", model="", **nothing, **_queued(queue), heartbeat_age_s=None)


def _total(rows: Sequence[Figures], between: Sequence[Counts | None]) -> Figures:
    def all_of(name: str) -> int:
        return sum(getattr(row, name) for row in rows)

    return Figures(
        worker="total",
        state="",
        circuit="",
        model="",
        running=all_of("running"),
        waiting=all_of("waiting"),
        max_running=all_of("max_running"),
        undelivered=all_of("undelivered"),
        pending=all_of("pending"),
        oldest_s=max((row.oldest_s for row in rows), default=0.0),
        blocks_used=all_of("blocks_used"),
        blocks_cached=all_of("blocks_cached"),
        blocks_total=all_of("blocks_total"),
        heartbeat_age_s=None,
        **_rates(between),
    )


def _queued(queue: Row | None) -> dict[str, Any]:
    if queue is None:
        return {"undelivered": 0, "pending": 0, "oldest_s": 0.0}
    return {
        "undelivered": queue["undelivered"],
        "pending": queue["pending"],
        "oldest_s": queue["oldest_age_ms"] / 1000,
    }


def _rates(between: Iterable[Counts | None]) -> dict[str, Any]:
    """Of workers together: what they give in a second adds up, shares and times of steps are means."""
    known = [each for each in between if each is not None]
    if not known:
        return {}
    steps, queried = sum(each.steps for each in known), sum(each.queried for each in known)
    busy_s = sum(each.busy_s for each in known)
    return {
        "output_tok_s": sum(each.output_tokens / each.seconds for each in known),
        "computed_tok_s": sum(each.computed_tokens / each.seconds for each in known),
        "hit_rate": sum(each.hit for each in known) / queried if queried else None,
        "step_ms": 1000 * busy_s / steps if steps else None,
        "busy": sum(each.busy_s / each.seconds for each in known) / len(known),
    }
