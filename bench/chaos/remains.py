"""Checks of what a run leaves: logs (I1, I2, I3), the broker (I4), pools (I5), figures (I6). Pure."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

from bench.chaos.findings import Finding
from bench.chaos.history import MERGED
from bench.chaos.outages import excused
from bench.chaos.streams import seen_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.chaos.evidence import Answer, LogEntry, Pool, Rules, Run, Scrape, Snapshot
    from bench.chaos.history import Request

LASTING: Final = ("workers", "jobs:", "dead", "ledger")
"""What may stay in the broker for ever, or as long as a worker lives."""
PER_REQUEST: Final = ("job:", "log:")
ACCEPTED: Final = "accepted"
IN_FLIGHT: Final = "in_flight"
LOST: Final = ("failed", "dead")
"""Ends that nothing in a run without poison is an excuse for."""
HITS: Final = 'octavo_prefix_tokens_total{result="hit"}'
QUERIES: Final = 'octavo_prefix_tokens_total{result="queried"}'


def check_log(request_id: str, log: tuple[LogEntry, ...], choices: int) -> Iterator[Finding]:
    """A token log by itself: what clients never see, because gateways pass it over, is here."""
    where = f"log of {request_id}"
    following: dict[int, int] = {}
    finishes: dict[int, str] = {}
    attempt = 0
    for entry in log:
        for choice in [entry.choice] if entry.attempt else [one for one in range(choices) if one not in finishes]:
            if choice in finishes:
                name = "second end" if entry.finish else "output behind the end"
                yield Finding("I1", name, where, f"choice {choice}: an entry behind its {finishes[choice]}")
            elif entry.finish:
                finishes[choice] = entry.finish
        if not entry.attempt:
            continue
        if entry.attempt < attempt:
            yield Finding("I2", "late attempt", where, f"an entry of attempt {entry.attempt} behind one of {attempt}")
        attempt = max(attempt, entry.attempt)
        expected = following.get(entry.choice, 0)
        if entry.start != expected:
            name = "gap" if entry.start > expected else "repeat"
            yield Finding("I2", name, where, f"choice {entry.choice}: an entry at {entry.start}, {expected} is next")
        following[entry.choice] = max(expected, entry.start + len(entry.tokens))


def check_log_tokens(request: Request, log: tuple[LogEntry, ...], oracle: Answer, rules: Rules) -> Iterator[Finding]:
    """The log has what is right (I3), and all that the client has seen (I2)."""
    where = f"log of {request.id}"
    placed: dict[int, dict[int, int]] = {}
    for entry in log:
        right = oracle.choices[entry.choice].tokens if entry.choice < len(oracle.choices) else ()
        for index, token in enumerate(entry.tokens, entry.start):
            placed.setdefault(entry.choice, {})[index] = token
            if index >= len(right) or right[index] != token:
                yield Finding("I3", "differs", where, f"choice {entry.choice}: token {index} is {token}")
                return
    if _asked_anew(request, log):
        return
    for choice, one in enumerate(seen_of(request)):
        unknown = sorted(set(one.tokens) - set(placed.get(choice, {})))
        if unknown and (one.whole or not rules.broker_loses):
            yield Finding("I2", "not in the log", where, f"choice {choice}: the client has tokens {unknown[:5]}")
    used = [call.usage.attempts for call in request.streams if call.usage]
    attempts = max((entry.attempt for entry in log), default=0)
    if used and max(used) < attempts:
        yield Finding("I2", "usage", where, f"{max(used)} attempts told, the log has {attempts}")


def _asked_anew(request: Request, log: tuple[LogEntry, ...]) -> bool:
    """Whether the product's client may have gone on under another id: that job's log has what this one lacks. It does
    so where a gateway that took a broken connection for its caller's leaving has cancelled the job."""
    merged = any(call.began.verb == MERGED for call in request.streams)
    return merged and any(entry.finish == "CANCELLED" for entry in log)


def check_broker(snapshot: Snapshot) -> Iterator[Finding]:
    """I4: nothing waits, nothing lives, nothing is charged, and what is left expires."""
    for worker, stream in snapshot.streams.items():
        if stream.length:
            yield Finding("I4", "entry left", f"jobs:{worker}", f"{stream.length} in the stream")
        if stream.pending:
            yield Finding("I4", "pending", f"jobs:{worker}", f"{stream.pending} read and not acknowledged")
    for request_id, job in snapshot.jobs.items():
        if job.state != "ended":
            yield Finding("I4", "live job", f"job:{request_id}", f"it is {job.state}, attempt {job.attempt}")
    for load, charged in snapshot.loads.items():
        if any(charged.values()):
            yield Finding("I4", "charge left", f"load:{load}", " ".join(f"{k}={v}" for k, v in charged.items()))
    for name, key in snapshot.keys.items():
        live = name.startswith("job:") and snapshot.jobs.get(name[4:]) is not None
        if live and snapshot.jobs[name[4:]].state != "ended":
            continue  # told already
        if key.ttl_ms is None and not name.startswith(LASTING) and not _told(name, snapshot):
            yield Finding("I4", "never expires", name, f"a {key.kind} without a TTL")


def _told(name: str, snapshot: Snapshot) -> bool:
    """Whether another finding of I4 is about this key: of a live job's log, or a load that is charged."""
    job = snapshot.jobs.get(name[4:]) if name.startswith("log:") else None
    load = snapshot.loads.get(name.removeprefix("load:")) if name.startswith("load:") else None
    return (job is not None and job.state != "ended") or (load is not None and any(load.values()))


def check_ledger(run: Run, rules: Rules) -> Iterator[Finding]:
    """I1, counted by the broker: what was accepted has ended, in ways that are right, and as well as clients saw."""
    ledger = run.broker.ledger
    if not ledger:
        return
    ended = {name: count for name, count in ledger.items() if name not in (ACCEPTED, IN_FLIGHT)}
    flying, accepted = ledger.get(IN_FLIGHT, 0), ledger.get(ACCEPTED, 0)
    parts = " + ".join(f"{count} {name}" for name, count in sorted(ended.items()))
    if accepted != sum(ended.values()) + flying:
        yield Finding("I1", "ledger", "ledger", f"{accepted} accepted, but {parts} + {flying} in flight")
    elif flying:
        yield Finding("I1", "ledger", "ledger", f"{flying} of {accepted} still in flight")
    lost = {name: ended.get(name, 0) for name in LOST}
    lost["failed"] -= sum(_failed_by_outage(request, run) for request in run.requests.values())
    if rules.lossless and any(count > 0 for count in lost.values()):
        told = " and ".join(f"{count} {name}" for name, count in lost.items() if count > 0)
        yield Finding("I1", "ledger fails", "ledger", f"{told}, of {accepted} accepted")
    whole = sum(all(one.whole for one in seen_of(request)) for request in run.requests.values())
    if not rules.broker_loses and ended.get("finished", 0) < whole:
        yield Finding(
            "I1", "ledger lacks", "ledger", f"{ended.get('finished', 0)} finished, clients have {whole} whole"
        )


def _failed_by_outage(request: Request, run: Run) -> bool:
    failed = any(one.finish == "ERROR" for one in seen_of(request))
    return failed and excused(request.streams[-1], run)


def check_pool(pool: Pool) -> Iterator[Finding]:
    """I5, and of I6 what the worker's lease tells."""
    parts = f"{pool.free} free + {pool.cached} cached + {pool.used} used"
    if pool.free + pool.cached + pool.used != pool.total or min(pool.free, pool.cached, pool.used) < 0:
        yield Finding("I5", "blocks", pool.worker, f"{parts}, of {pool.total}")
    elif pool.used:
        yield Finding("I5", "in use", pool.worker, f"{pool.used} blocks in use by nobody")
    if pool.running or pool.waiting:
        yield Finding("I6", "gauge", pool.worker, f"{pool.running} running, {pool.waiting} waiting")


def check_scrapes(life: str, scrapes: tuple[Scrape, ...]) -> Iterator[Finding]:
    """I6, of one life of a process."""
    if scrapes:
        for name, value in scrapes[-1].gauges.items():
            if value != 0:
                yield Finding("I6", "gauge", life, f"{name} is {value:g} at the end")
    for before, after in pairwise(scrapes):
        for name, value in before.counters.items():
            if after.counters.get(name, value) < value:
                yield Finding("I6", "counter", life, f"{name} fell from {value:g} to {after.counters[name]:g}")
    for scrape in scrapes:
        if scrape.counters.get(HITS, 0) > scrape.counters.get(QUERIES, 0):
            yield Finding("I6", "hits", life, f"{scrape.counters[HITS]:g} of {scrape.counters.get(QUERIES, 0):g}")
            return


def check_remains(run: Run, rules: Rules) -> Iterator[Finding]:
    """All of this module's checks but those of logs."""
    yield from check_broker(run.broker)
    yield from check_ledger(run, rules)
    for pool in run.pools:
        yield from check_pool(pool)
    for life, scrapes in run.scrapes.items():
        yield from check_scrapes(life, scrapes)
