"""Jobs that go on from their token logs: at another worker, or at their own after the broker lost a part of them."""

from __future__ import annotations

import json
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from kvstore.jobs import JobState, Rehomed, Target
from kvstore.registry import Registry
from octavo.v1 import inference_pb2, job_pb2
from tests.integration.worker.one_worker import Fleet, by_choice, running_worker
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.client import Broker
    from worker.step import StepOutput

PROMPT = list(range(5, 38))
TOKENS = 60
POETS = json.dumps({"type": "array", "items": {"enum": ["Virgil", "Homer", "Horace", "Ovid"]}, "minItems": TOKENS})
"""A form that takes more tokens than there may be."""

LOSE = """
local job, log, lost = KEYS[1], KEYS[2], tonumber(ARGV[1])
for _, entry in ipairs(redis.call('XREVRANGE', log, '+', '-', 'COUNT', lost)) do
  redis.call('XDEL', log, entry[1])
end
if ARGV[2] == 'log' then
  redis.call('DEL', log)
end
redis.call('HINCRBY', job, 'next:0', -lost)
return tonumber(redis.call('HGET', job, 'next:0'))
"""
"""What a server forgets that comes back without its last commits: a job of one choice is as it was before them. With
'log', its log is lost besides."""


def slow_down(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that takes its time, so that there is time to lose something."""
    step = fleet.worker.engine.step

    def slow_step() -> StepOutput:
        time.sleep(0.01)
        return step()

    monkeypatch.setattr(fleet.worker.engine, "step", slow_step)


async def expected(fleet: Fleet, *, n: int = 1, wanted: int | None = None, form: str = "") -> list[job_pb2.Delivery]:
    """The log of the job that these tests disturb, undisturbed."""
    await submit(fleet, "alone", n=n, wanted=wanted, form=form)
    return await fleet.ended("alone")


async def submit(fleet: Fleet, name: str, *, n: int = 1, wanted: int | None = None, form: str = "") -> None:
    """`form`: a JSON schema of the answers, if any."""

    def edit(job: job_pb2.Job) -> None:
        if wanted is not None:
            job.logprobs, job.prompt_logprobs = wanted, wanted
        if form:
            job.structure.json_schema, job.stopping.ignore_eos = form, False

    await fleet.submit(name, PROMPT, TOKENS, seed=11, n=n, edit=edit)


def chunks(log: list[job_pb2.Delivery]) -> dict[tuple[int, int], inference_pb2.Chunk]:
    """By choice and first token, after checking that each choice is whole."""
    by_choice(log)
    return {(delivery.chunk.choice, delivery.chunk.start): delivery.chunk for delivery in log}


@pytest.mark.parametrize(("lost", "form"), [(1, ""), (5, ""), (5, POETS)], ids=["1", "5", "5, with a form"])
async def test_what_the_broker_loses_of_a_log_is_said_again(
    broker: Broker, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int, form: str
) -> None:
    async with running_worker(broker, model_dir, tmp_path) as fleet:
        alone = await expected(fleet, wanted=1, form=form)
        slow_down(fleet, monkeypatch)
        await submit(fleet, "gap", wanted=1, form=form)
        for enough in (8, 20):
            await fleet.tokens("gap", enough)
            names = [broker.keys.job("gap"), broker.keys.log("gap")]
            assert await broker.call("EVAL", LOSE, 2, *names, lost, "") >= enough - lost
        log = await fleet.ended("gap")
        assert chunks(log) == chunks(alone)
        assert log[-1].usage == alone[-1].usage
        assert fleet.metrics.get_sample_value("octavo_resumed_total", {"after": "gap"}) == 2
        await fleet.idle()


async def test_a_log_that_lacks_what_is_committed_ends_the_job(
    broker: Broker, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_worker(broker, model_dir, tmp_path) as fleet:
        slow_down(fleet, monkeypatch)
        await submit(fleet, "torn")
        await fleet.tokens("torn", 8)
        names = [broker.keys.job("torn"), broker.keys.log("torn")]
        assert await broker.call("EVAL", LOSE, 2, *names, 3, "log") > 0

        async def has_ended() -> bool:
            record = await fleet.jobs.get("torn")
            return record is not None and record.state is JobState.ENDED

        await until(has_ended, within_s=20)
        (last,) = [delivery for delivery in await fleet.log("torn") if delivery.chunk.finish]
        assert (last.failure, last.chunk.error) == (
            job_pb2.FAILURE_UNAVAILABLE,
            "the broker lost a part of this job's output",
        )
        await fleet.idle()


async def test_a_log_that_is_none_any_more_ends_the_job(
    broker: Broker, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody wrote over it: what was said is lost, and the job must not wait for it for ever."""
    async with running_worker(broker, model_dir, tmp_path) as fleet:
        slow_down(fleet, monkeypatch)
        await submit(fleet, "spoilt")
        await fleet.tokens("spoilt", 8)
        await broker.call("SET", broker.keys.log("spoilt"), "no stream")

        async def has_ended() -> bool:
            record = await fleet.jobs.get("spoilt")
            return record is not None and record.state is JobState.ENDED

        await until(has_ended, within_s=20)
        (last,) = await fleet.log("spoilt")
        assert (last.failure, last.chunk.error) == (
            job_pb2.FAILURE_UNAVAILABLE,
            "the broker lost a part of this job's output",
        )
        assert last.chunk.start >= 8
        await fleet.idle()


@pytest.mark.parametrize(("n", "form"), [(1, ""), (3, ""), (3, POETS)], ids=["1", "3", "3, with a form"])
async def test_a_job_that_a_worker_has_left_goes_on_at_another(
    broker: Broker, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int, form: str
) -> None:
    """The second has nothing of it in its cache, and says what the first would have said, to the last bit."""
    async with AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(running_worker(broker, model_dir, tmp_path, name=name, grace=0.0))
            for name in ("w0", "w1")
        ]
        alone = await expected(first, n=n, wanted=2, form=form)
        slow_down(first, monkeypatch)
        await submit(first, "moved", n=n, wanted=2, form=form)
        await first.tokens("moved", 10 * n)
        first.loop.drain()
        await until(lambda: ended(first), within_s=10)
        before = await first.log("moved")
        assert len(before) < TOKENS * n
        await rehome(second)
        log = await second.ended("moved")
        assert chunks(log) == chunks(alone)
        assert log[: len(before)] == before
        assert {delivery.attempt for delivery in before} == {1}
        assert {delivery.attempt for delivery in log[len(before) :]} == {2}
        assert [delivery.HasField("route") for delivery in log] == [True] + [False] * (len(log) - 1)
        usage, undisturbed = log[-1].usage, alone[-1].usage
        undisturbed.attempts = 2
        assert usage == undisturbed
        assert second.metrics.get_sample_value("octavo_resumed_total", {"after": "attempt"}) == 1
        await second.idle()


async def test_a_job_that_has_said_nothing_begins_at_another(broker: Broker, model_dir: Path, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(running_worker(broker, model_dir, tmp_path, name=name, grace=0.0))
            for name in ("w0", "w1")
        ]
        first.loop.drain()
        await first.running
        await Registry(broker).register(first.worker.info)
        await submit(first, "unread")
        await Registry(broker).leave("w0", first.worker.info.incarnation)
        await rehome(second)
        log = await second.ended("unread")
        assert len(by_choice(log)[0]) == TOKENS
        assert (log[0].route.worker, log[-1].usage.attempts) == ("w1", 1)
        assert second.metrics.get_sample_value("octavo_resumed_total", {"after": "attempt"}) == 0


async def rehome(to: Fleet) -> None:
    """What a gateway's reaper does with the one orphan that there is."""
    info = to.worker.info
    (orphan,) = await to.jobs.orphans()
    target = Target(info.id, info.incarnation, orphan.prompt_tokens + max(orphan.next), 0)
    assert await to.jobs.rehome(orphan, target) is Rehomed.MOVED


async def ended(fleet: Fleet) -> bool:
    return fleet.running.done()
