"""Exact findings in what a run leaves: logs, the broker, pools, metrics."""

from __future__ import annotations

from bench.chaos.checker import check
from bench.chaos.evidence import JobFacts, Key, LogEntry, Pool, Rules, Run, Scrape, Snapshot, Stream
from bench.chaos.findings import Finding


def remains(
    broker: Snapshot | None = None, *pools: Pool, scrapes: tuple[Scrape, ...] = (), lossless: bool = True
) -> list[Finding]:
    run = Run({}, {}, broker or Snapshot(), pools, {"w0": scrapes} if scrapes else {})
    return check(run, Rules(lossless=lossless))


def log_of(*entries: LogEntry) -> list[str]:
    broker = Snapshot(jobs={"r": JobFacts("ended", 2, 2)}, logs={"r": entries})
    return [f"{each.invariant} {each.name}" for each in remains(broker)]


class TestLogs:
    def test_right(self) -> None:
        assert log_of(LogEntry(1, 0, 0, (7,)), LogEntry(2, 0, 1, (8,), "STOP"), LogEntry(2, 1, 0, (3,), "STOP")) == []
        assert log_of(LogEntry(1, 0, 0, (7,), "STOP"), LogEntry(0, 0, 0, (), "CANCELLED")) == []

    def test_wrong(self) -> None:
        assert log_of(LogEntry(1, 0, 0, (7,)), LogEntry(1, 0, 0, (7,))) == ["I2 repeat"]
        assert log_of(LogEntry(1, 0, 1, (7,))) == ["I2 gap"]
        assert log_of(LogEntry(2, 0, 0, (7,)), LogEntry(1, 0, 1, (8,))) == ["I2 late attempt"]
        assert log_of(LogEntry(1, 0, 0, (7,), "STOP"), LogEntry(1, 0, 1, (8,))) == ["I1 output behind the end"]
        cancelled_twice = (LogEntry(0, 0, 0, (), "CANCELLED"), LogEntry(1, 1, 0, (), "CANCELLED"))
        assert log_of(*cancelled_twice) == ["I1 second end"]


class TestRemains:
    def test_right(self) -> None:
        keys = {"job:r": Key("hash", 9), "log:r": Key("stream", 9), "workers": Key("zset", None)}
        keys |= {"jobs:w0": Key("stream", None), "gateway:g": Key("string", 3000)}
        broker = Snapshot(
            keys, {"w0": Stream(0, 0)}, {"r": JobFacts("ended", 1, 1)}, ledger={"accepted": 1, "expired": 1}
        )
        assert remains(broker, Pool("w0", 9, 4, 5, 0)) == []

    def test_the_broker(self) -> None:
        keys = {"job:r": Key("hash", None), "log:r": Key("stream", None), "log:s": Key("stream", None)}
        keys |= {"load:w0:i": Key("hash", None), "odd": Key("string", None)}
        broker = Snapshot(
            keys, {"w0": Stream(1, 2)}, {"r": JobFacts("running", 2, 1)}, loads={"w0:i": {"jobs": 1, "tokens": 5}}
        )
        assert remains(broker) == [
            Finding("I4", "charge left", "load:w0:i", "jobs=1 tokens=5"),
            Finding("I4", "entry left", "jobs:w0", "1 in the stream"),
            Finding("I4", "live job", "job:r", "it is running, attempt 2"),
            Finding("I4", "never expires", "log:s", "a stream without a TTL"),
            Finding("I4", "never expires", "odd", "a string without a TTL"),
            Finding("I4", "pending", "jobs:w0", "2 read and not acknowledged"),
        ]

    def test_the_ledger(self) -> None:
        lost = remains(Snapshot(ledger={"accepted": 5, "finished": 3, "expired": 1, "in_flight": 0}))
        assert lost == [Finding("I1", "ledger", "ledger", "5 accepted, but 1 expired + 3 finished + 0 in flight")]
        flying = remains(Snapshot(ledger={"accepted": 5, "finished": 3, "in_flight": 2}))
        assert flying == [Finding("I1", "ledger", "ledger", "2 of 5 still in flight")]

    def test_a_ledger_with_ends_that_must_not_be(self) -> None:
        broker = Snapshot(ledger={"accepted": 6, "finished": 3, "failed": 2, "dead": 1, "in_flight": 0})
        assert remains(broker) == [Finding("I1", "ledger fails", "ledger", "2 failed and 1 dead, of 6 accepted")]
        assert remains(broker, lossless=False) == []

    def test_pools(self) -> None:
        assert remains(None, Pool("w0", 9, 4, 5, 1)) == [
            Finding("I5", "blocks", "w0", "4 free + 5 cached + 1 used, of 9")
        ]
        assert remains(None, Pool("w0", 9, 4, 4, 1, 1, 0)) == [
            Finding("I5", "in use", "w0", "1 blocks in use by nobody"),
            Finding("I6", "gauge", "w0", "1 running, 0 waiting"),
        ]
        assert remains(None, Pool("w0", 9, 10, -1, 0)) == [
            Finding("I5", "blocks", "w0", "10 free + -1 cached + 0 used, of 9")
        ]

    def test_scrapes(self) -> None:
        hits, queries = 'octavo_prefix_tokens_total{result="hit"}', 'octavo_prefix_tokens_total{result="queried"}'
        good = (Scrape({"streams": 3}, {"a_total": 1, hits: 1, queries: 1}), Scrape({"streams": 0}, {"a_total": 1}))
        assert remains(scrapes=good) == []
        bad = (Scrape({"streams": 0}, {"a_total": 2, hits: 2, queries: 1}), Scrape({"streams": 1}, {"a_total": 1}))
        assert remains(scrapes=bad) == [
            Finding("I6", "counter", "w0", "a_total fell from 2 to 1"),
            Finding("I6", "gauge", "w0", "streams is 1 at the end"),
            Finding("I6", "hits", "w0", "2 of 1"),
        ]
