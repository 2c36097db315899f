"""What waits goes out together, in order, and again until Redis has it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvstore import outage
from kvstore.errors import BrokerAuth, BrokerUnreachable, CommitGap
from kvstore.jobs import Commit
from tests.unit.worker.committer_line import Line, delivery, running_line
from worker import committer
from worker.past import RolledBack

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def line(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Line]:
    async with running_line(monkeypatch) as line:
        yield line


async def test_steps_that_wait_go_out_in_one_commit(line: Line) -> None:
    line.jobs.gate.clear()
    for start in range(5):
        await line.committer.put([delivery("a", start)])
        await asyncio.sleep(0)  # the first one is on its way by then
    line.jobs.gate.set()
    await line.committer.flushed()
    assert line.jobs.commits == [["a0"], ["a1", "a2", "a3", "a4"]]
    assert line.outcomes == [(f"a{start}", Commit.WRITTEN) for start in range(5)]
    assert line.committer.unsettled == 0


async def test_the_engine_waits_only_when_many_steps_wait(line: Line) -> None:
    line.jobs.gate.clear()
    await line.committer.put([delivery("a", 0)])
    await asyncio.sleep(0)
    for start in range(committer.STEPS_AHEAD):
        await line.committer.put([delivery("a", start + 1)])
    one_more = asyncio.create_task(line.committer.put([delivery("a", 99)]))
    await asyncio.sleep(0)
    assert not one_more.done()
    line.jobs.gate.set()
    await one_more
    await line.committer.flushed()
    assert len(line.outcomes) == committer.STEPS_AHEAD + 2


async def test_a_failed_commit_is_repeated(line: Line) -> None:
    line.jobs.script = [BrokerUnreachable("away"), BrokerUnreachable("away"), Commit.DUPLICATE]
    await line.committer.put([delivery("a", 0)])
    await line.committer.flushed()
    assert line.jobs.commits == [["a0"]] * 3
    assert line.outcomes == [("a0", Commit.DUPLICATE)]


@pytest.mark.parametrize("what", ["commit", "end"])
async def test_what_is_refused_for_long_is_not_tried_for_ever(
    line: Line, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(outage, "REFUSED_S", 0.05)
    refused = [BrokerAuth("NOPERM")] * 10**6
    if what == "commit":
        line.jobs.script = [*refused]
    else:
        line.jobs.script, line.jobs.finishes = [CommitGap({"a": {0: 3}})], [*refused]
    await line.committer.put([delivery("a", 7)])
    with pytest.raises(BrokerAuth, match="NOPERM"):
        await asyncio.wait_for(line.running, 5)
    assert len(line.jobs.script if what == "commit" else line.jobs.finishes) < 10**6 - 1
    assert line.outcomes == []


async def test_a_job_with_a_gap_that_cannot_go_on_is_ended_and_the_others_are_told_their_outcome(line: Line) -> None:
    line.jobs.script = [CommitGap({"a": {0: 3}}), Commit.DUPLICATE]
    line.jobs.finishes = [BrokerUnreachable("flapping"), None]
    await line.committer.put([delivery("a", 7), delivery("b", 2), delivery("a", 8)])
    await line.committer.flushed()
    assert line.jobs.finished == ["a"]
    assert line.jobs.commits == [["a7", "b2", "a8"], ["b2"]]
    assert line.outcomes == [("a7", Commit.FENCED), ("b2", Commit.DUPLICATE), ("a8", Commit.FENCED)]


async def test_a_job_with_a_gap_goes_on_and_what_was_queued_of_it_is_forgotten(line: Line) -> None:
    """Up to the moment in which it is taken back: what comes later is new."""
    line.becomes = {"a": RolledBack.GOES_ON}
    line.jobs.gate.clear()
    line.jobs.script = [CommitGap({"a": {0: 3}}), Commit.DUPLICATE]
    await line.committer.put([delivery("a", 7), delivery("b", 2)])
    await asyncio.sleep(0)  # on its way
    await line.committer.put([delivery("a", 8), delivery("b", 3)])
    await line.committer.put([delivery("a", 9)])
    line.jobs.gate.set()
    await line.committer.flushed()
    await line.committer.put([delivery("a", 3), delivery("b", 4)])
    await line.committer.flushed()
    assert line.lost == [("a", 1, {0: 3})]
    assert line.jobs.finished == []
    assert line.jobs.commits == [["a7", "b2"], ["b2"], ["b3"], ["a3", "b4"]]
    assert line.outcomes == [
        ("b2", Commit.DUPLICATE),
        ("b3", Commit.WRITTEN),
        ("a3", Commit.WRITTEN),
        ("b4", Commit.WRITTEN),
    ]
    assert line.committer.unsettled == 0


async def test_a_job_may_have_gaps_again(line: Line) -> None:
    line.becomes = {"a": RolledBack.GOES_ON}
    line.jobs.script = [CommitGap({"a": {0: 3}}), Commit.WRITTEN, CommitGap({"a": {0: 1, 1: 0}})]
    for start in (7, 3, 1):
        await line.committer.put([delivery("a", start)])
        await line.committer.flushed()
    assert line.lost == [("a", 1, {0: 3}), ("a", 1, {0: 1, 1: 0})]
    assert line.outcomes == [("a1", Commit.WRITTEN)]
    assert line.jobs.commits == [["a7"], [], ["a3"], [], ["a1"]]


async def test_of_several_gaps_each_is_judged(line: Line) -> None:
    line.becomes = {"b": RolledBack.GOES_ON}
    line.jobs.script = [CommitGap({"a": {0: 3}, "b": {1: 2}})]
    await line.committer.put([delivery("a", 7), delivery("b", 5), delivery("c", 1)])
    await line.committer.flushed()
    assert line.jobs.finished == ["a"]
    assert line.jobs.commits == [["a7", "b5", "c1"], ["c1"]]
    assert line.outcomes == [("a7", Commit.FENCED), ("c1", Commit.WRITTEN)]


async def test_a_job_that_was_left_to_others_is_not_ended(line: Line) -> None:
    """It has a gap, and does not run here any more: who gets it goes on from what is left."""
    line.becomes = {"a": RolledBack.NOT_OURS}
    line.jobs.script = [CommitGap({"a": {0: 3}}), Commit.WRITTEN, CommitGap({"a": {0: 3}})]
    await line.committer.put([delivery("a", 7), delivery("b", 2)])
    await line.committer.flushed()
    await line.committer.put([delivery("a", 8)])
    await line.committer.flushed()
    assert line.lost == [("a", 1, {0: 3})] * 2
    assert line.jobs.finished == []
    assert line.jobs.commits == [["a7", "b2"], ["b2"], ["a8"], []]
    assert line.outcomes == [("b2", Commit.WRITTEN)]
    assert line.committer.unsettled == 0


async def test_what_is_told_carries_the_entry_of_its_job_as_it_was_then(line: Line) -> None:
    """The id may be submitted anew while the first job's output waits."""
    line.jobs.gate.clear()
    line.claimed_by = {"a": "1-0", "b": "2-0"}
    await line.committer.put([delivery("a", 0), delivery("b", 0)])
    await asyncio.sleep(0)
    await line.committer.put([delivery("a", 1)])
    line.claimed_by = {"a": "3-0"}
    await line.committer.put([delivery("a", 0), delivery("b", 1)])
    line.jobs.script = [CommitGap({"b": {0: 3}})]
    line.jobs.gate.set()
    await line.committer.flushed()
    assert line.jobs.commits == [["a0", "b0"], ["a0"], ["a1", "a0", "b1"]]
    assert line.jobs.entries == [["1-0", "2-0"], ["1-0"], ["1-0", "3-0", ""]]


async def test_a_gap_is_of_the_job_that_has_the_id_now(line: Line) -> None:
    """What was said of the one before it, whatever its attempt was, is refused, and told so."""
    line.jobs.script = [BrokerUnreachable("away"), CommitGap({"a": {0: 0}}), Commit.FENCED]
    line.becomes["a"] = RolledBack.GOES_ON
    line.claimed_by["a"] = "1-0"
    line.jobs.gate.clear()
    old = delivery("a", 7)
    old.attempt = 3
    await line.committer.put([old])
    line.claimed_by["a"] = "2-0"
    await line.committer.put([delivery("a", 1)])
    line.jobs.gate.set()
    await line.committer.flushed()
    assert line.lost == [("a", 1, {0: 0})]
    assert line.lost_of == ["2-0"]
    assert line.jobs.commits[-1] == ["a7"]
    assert line.outcomes == [("a7", Commit.FENCED)]
