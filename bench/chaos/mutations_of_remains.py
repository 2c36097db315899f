"""Lies about what a run leaves in the broker, the pools and the metrics; see ``mutations``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from bench.chaos.evidence import Key, LogEntry, Pool, Run, Scrape, Stream
from bench.chaos.remains import HITS, LOST, QUERIES

if TYPE_CHECKING:
    import random
    from collections.abc import Callable


def job_left_in_a_stream(run: Run, numbers: random.Random) -> Run | None:
    return _stream(run, numbers, Stream(1, 0))


def entry_never_acknowledged(run: Run, numbers: random.Random) -> Run | None:
    return _stream(run, numbers, Stream(0, 1))


def job_still_alive(run: Run, numbers: random.Random) -> Run | None:
    if not run.broker.jobs:
        return None
    name = numbers.choice(sorted(run.broker.jobs))
    job = replace(run.broker.jobs[name], state=numbers.choice(("queued", "running")))
    kept = {each: key for each, key in run.broker.keys.items() if each != f"job:{name}"}
    keys = {**kept, f"job:{name}": Key("hash", None)}
    return _broker(run, jobs={**run.broker.jobs, name: job}, keys=keys)


def charge_never_refunded(run: Run, numbers: random.Random) -> Run | None:
    load = f"w{numbers.randrange(2)}:{numbers.getrandbits(64):016x}"
    keys = {**run.broker.keys, f"load:{load}": Key("hash", None)}
    return _broker(run, loads={**run.broker.loads, load: {"jobs": 1, "tokens": 100}}, keys=keys)


def key_that_never_expires(run: Run, numbers: random.Random) -> Run | None:
    names = sorted(name for name in run.broker.keys if name.startswith(("job:", "log:")))
    if not names:
        return None
    name = numbers.choice(names)
    return _broker(run, keys={**run.broker.keys, name: replace(run.broker.keys[name], ttl_ms=None)})


def unfenced_write(run: Run, numbers: random.Random) -> Run | None:
    """What an earlier attempt had computed is written behind a later one's: the check of the attempt is gone. No client
    sees it, since gateways pass over what they have."""

    def places(log: tuple[LogEntry, ...]) -> list[int]:
        return [index for index, entry in enumerate(log[:-1]) if entry.tokens and not entry.finish]

    def change(log: list[LogEntry], index: int) -> None:
        log.insert(index + 1, replace(log[index], attempt=max(1, log[index].attempt - 1)))

    return _log(run, numbers, places, change)


def log_with_a_hole(run: Run, numbers: random.Random) -> Run | None:
    """A step was never written, and the client has not seen it either."""

    def places(log: tuple[LogEntry, ...]) -> list[int]:
        later = {(entry.choice, entry.start) for entry in log if entry.tokens}
        return [
            i for i, one in enumerate(log) if one.tokens and any(c == one.choice and s > one.start for c, s in later)
        ]

    return _log(run, numbers, places, lambda log, index: log.pop(index))


def log_with_a_second_end(run: Run, numbers: random.Random) -> Run | None:
    def places(log: tuple[LogEntry, ...]) -> list[int]:
        return [index for index, entry in enumerate(log) if entry.finish and entry.attempt]

    def change(log: list[LogEntry], index: int) -> None:
        end = log[index]
        log.append(replace(end, start=end.start + len(end.tokens), tokens=(), attempt=max(e.attempt for e in log)))

    return _log(run, numbers, places, change)


def miscounted_ledger(run: Run, numbers: random.Random) -> Run | None:
    ledger = dict(run.broker.ledger)
    if not ledger:
        return None
    ledger[numbers.choice(sorted(ledger))] += 1
    return _broker(run, ledger=ledger)


def failure_that_no_client_saw(run: Run, numbers: random.Random) -> Run | None:
    """The sum is right, but a job that was accepted ended in a way that it must not."""
    ledger = dict(run.broker.ledger)
    ends = [name for name in ("finished", "cancelled", "expired") if ledger.get(name)]
    if not ends:
        return None
    lost = numbers.choice(LOST)
    ledger[numbers.choice(ends)] -= 1
    ledger[lost] = ledger.get(lost, 0) + 1
    return _broker(run, ledger=ledger)


def leaked_block(run: Run, numbers: random.Random) -> Run | None:
    """In use by nobody."""

    def change(pool: Pool) -> Pool:
        if pool.free:
            return replace(pool, free=pool.free - 1, used=pool.used + 1)
        return replace(pool, cached=pool.cached - 1, used=pool.used + 1)

    return _pool(run, numbers, change)


def lost_block(run: Run, numbers: random.Random) -> Run | None:
    """Nowhere."""

    def change(pool: Pool) -> Pool:
        return replace(pool, free=pool.free - 1) if pool.free else replace(pool, cached=pool.cached - 1)

    return _pool(run, numbers, change)


def sequence_that_never_ends(run: Run, numbers: random.Random) -> Run | None:
    def change(pool: Pool) -> Pool:
        return replace(pool, running=1) if numbers.random() < 0.5 else replace(pool, waiting=1)

    return _pool(run, numbers, change)


def stuck_gauge(run: Run, numbers: random.Random) -> Run | None:
    def change(scrapes: list[Scrape]) -> bool:
        gauges = dict(scrapes[-1].gauges)
        if not gauges:
            return False
        gauges[numbers.choice(sorted(gauges))] = 1.0
        scrapes[-1] = replace(scrapes[-1], gauges=gauges)
        return True

    return _scrapes(run, numbers, change)


def falling_counter(run: Run, numbers: random.Random) -> Run | None:
    def change(scrapes: list[Scrape]) -> bool:
        counters = dict(scrapes[-1].counters)
        names = sorted(name for name, value in counters.items() if value > 0 and name not in (HITS, QUERIES))
        if len(scrapes) < 2 or not names:
            return False
        name = numbers.choice(names)
        highest = max(scrape.counters.get(name, 0.0) for scrape in scrapes[:-1])
        if highest <= 0:
            return False
        counters[name] = highest - 0.5
        scrapes[-1] = replace(scrapes[-1], counters=counters)
        return True

    return _scrapes(run, numbers, change)


def more_hits_than_queries(run: Run, numbers: random.Random) -> Run | None:
    def change(scrapes: list[Scrape]) -> bool:
        counters = dict(scrapes[-1].counters)
        if QUERIES not in counters:
            return False
        counters[HITS] = counters[QUERIES] + 1
        scrapes[-1] = replace(scrapes[-1], counters=counters)
        return True

    return _scrapes(run, numbers, change)


CHANGES: Final[tuple[tuple[str, Callable[[Run, random.Random], Run | None]], ...]] = (
    ("I4", job_left_in_a_stream),
    ("I4", entry_never_acknowledged),
    ("I4", job_still_alive),
    ("I4", charge_never_refunded),
    ("I4", key_that_never_expires),
    ("I2", unfenced_write),
    ("I2", log_with_a_hole),
    ("I1", log_with_a_second_end),
    ("I1", miscounted_ledger),
    ("I1", failure_that_no_client_saw),
    ("I5", leaked_block),
    ("I5", lost_block),
    ("I6", sequence_that_never_ends),
    ("I6", stuck_gauge),
    ("I6", falling_counter),
    ("I6", more_hits_than_queries),
)


def _broker(run: Run, **changes: Any) -> Run:
    return replace(run, broker=replace(run.broker, **changes))


def _stream(run: Run, numbers: random.Random, stream: Stream) -> Run | None:
    if not run.broker.streams:
        return None
    worker = numbers.choice(sorted(run.broker.streams))
    return _broker(run, streams={**run.broker.streams, worker: stream})


def _log(
    run: Run,
    numbers: random.Random,
    places: Callable[[tuple[LogEntry, ...]], list[int]],
    change: Callable[[list[LogEntry], int], object],
) -> Run | None:
    found = [(name, index) for name, log in run.broker.logs.items() for index in places(log)]
    if not found:
        return None
    name, index = numbers.choice(found)
    log = list(run.broker.logs[name])
    change(log, index)
    return _broker(run, logs={**run.broker.logs, name: tuple(log)})


def _pool(run: Run, numbers: random.Random, change: Callable[[Pool], Pool]) -> Run | None:
    if not run.pools:
        return None
    pools = list(run.pools)
    index = numbers.randrange(len(pools))
    pools[index] = change(pools[index])
    return replace(run, pools=tuple(pools))


def _scrapes(run: Run, numbers: random.Random, change: Callable[[list[Scrape]], bool]) -> Run | None:
    lives = sorted(run.scrapes)
    numbers.shuffle(lives)
    for life in lives:
        scrapes = list(run.scrapes[life])
        if scrapes and change(scrapes):
            return replace(run, scrapes={**run.scrapes, life: tuple(scrapes)})
    return None
