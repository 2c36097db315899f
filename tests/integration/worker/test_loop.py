"""The worker's shell on a real broker with a real (tiny) model."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

from kvstore.client import BrokerConfig, connect
from kvstore.embedded import EmbeddedBroker
from kvstore.jobs import Committed, Finished, JobState, Submitted
from kvstore.registry import Registry
from octavo.v1 import inference_pb2, job_pb2
from tests.integration.worker.one_worker import GATEWAY, LONG, OTHER_GATEWAY, Fleet, joined, running_worker
from tests.support.waiting import until
from worker.errors import LeaseLostError, StuckError
from worker.intake import READ_AHEAD
from worker.metrics import SHELL_PARTS

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from kvstore.client import Broker
    from worker.sequence import Request
    from worker.step import StepOutput


async def test_batched_answers_equal_solo_answers(broker: Broker, model_dir: Path, tmp_path: Path) -> None:
    prompts = {f"r{i}": list(range(2, 2 + 7 * (i + 1))) for i in range(8)}
    async with running_worker(broker, model_dir, tmp_path) as fleet:
        solo = {}
        for name, prompt in prompts.items():
            await fleet.submit(f"solo-{name}", prompt, 20, seed=7)
            solo[name] = joined(await fleet.ended(f"solo-{name}"))
        for name, prompt in prompts.items():
            await fleet.submit(name, prompt, 20, seed=7)
        for name in prompts:
            log = await fleet.ended(name)
            assert joined(log) == solo[name]
            assert log[-1].chunk.finish == inference_pb2.LENGTH
            assert log[-1].usage.completion_tokens == 20
            assert log[-1].usage.attempts == 1
            assert log[0].route.worker == "w0"
        await fleet.idle()
        assert fleet.metrics.get_sample_value("octavo_jobs_total", {"outcome": "length"}) == 16
        assert fleet.metrics.get_sample_value("octavo_worker_sequences", {"state": "running"}) == 0
        assert fleet.metrics.get_sample_value("octavo_prefix_tokens_total", {"result": "hit"})
        steps = fleet.metrics.get_sample_value("octavo_step_seconds_count")
        parts = [fleet.metrics.get_sample_value("octavo_part_seconds_count", {"part": part}) for part in SHELL_PARTS]
        assert parts == [16, steps, steps]
        assert fleet.metrics.get_sample_value("octavo_broker_seconds_sum", {"call": "commit"})


async def test_a_cancelled_job_stops_and_frees_its_blocks(broker: Broker, model_dir: Path, tmp_path: Path) -> None:
    async with running_worker(broker, model_dir, tmp_path) as fleet:
        await fleet.submit("long", [5, 6, 7], LONG)
        await fleet.tokens("long", 3)
        assert await fleet.jobs.cancel("long") is Finished.ENDED
        await fleet.idle()
        log = await fleet.log("long")
        assert [d.chunk.finish for d in log if d.chunk.finish] == [inference_pb2.CANCELLED]
        assert log[-1].chunk.finish == inference_pb2.CANCELLED
        await fleet.submit("next", [5, 6, 7], 4)
        assert len(joined(await fleet.ended("next"))) == 4


async def test_what_there_is_no_room_for_waits_in_redis(broker: Broker, model_dir: Path, tmp_path: Path) -> None:
    async with running_worker(broker, model_dir, tmp_path, max_running=2) as fleet:
        for i in range(2 + READ_AHEAD + 3):
            await fleet.submit(f"r{i}", [9, 8, 7 + i], LONG)
        await fleet.tokens("r1", 1)

        async def read_ahead() -> bool:
            (queue,) = await fleet.jobs.queues()
            return (queue.undelivered, queue.pending) == (3, 2 + READ_AHEAD)

        await until(read_ahead, within_s=10)
        for i in range(2 + READ_AHEAD + 3):
            await fleet.jobs.cancel(f"r{i}")
        await fleet.idle()
        (queue,) = await fleet.jobs.queues()
        assert (queue.undelivered, queue.pending) == (0, 0)


async def test_a_higher_priority_takes_a_place(broker: Broker, model_dir: Path, tmp_path: Path) -> None:
    """G07 through Redis: neither slots nor the order of arrival hold it up, and who gave way goes on unharmed."""

    def urgent(job: job_pb2.Job) -> None:
        job.priority = 5

    async with running_worker(broker, model_dir, tmp_path, max_running=2) as fleet:
        for i in range(4):
            await fleet.submit(f"r{i}", [9, 8, 7 + i], 200)
        await fleet.tokens("r1", 1)
        await fleet.submit("urgent", [9, 8, 7], 20, edit=urgent)
        assert len(joined(await fleet.ended("urgent"))) == 20
        for i in range(4):
            job = await fleet.jobs.get(f"r{i}")
            assert job is not None
            assert job.state is not JobState.ENDED
        for i in range(4):
            assert len(joined(await fleet.ended(f"r{i}"))) == 200


async def test_a_deadline_ends_the_job_with_its_failure(broker: Broker, model_dir: Path, tmp_path: Path) -> None:
    async with running_worker(broker, model_dir, tmp_path) as fleet:
        await fleet.submit("late", [5, 6, 7], LONG, deadline_ms=30)
        log = await fleet.ended("late")
        assert log[-1].failure == job_pb2.FAILURE_DEADLINE
        assert log[-1].chunk.finish == inference_pb2.ERROR
        await fleet.idle()


async def test_a_prompt_that_cannot_fit_is_refused_with_the_limit(
    broker: Broker, model_dir: Path, tmp_path: Path
) -> None:
    async with running_worker(broker, model_dir, tmp_path) as fleet:
        await fleet.submit("huge", [5] * 600, 4)
        log = await fleet.ended("huge")
        assert log[-1].failure == job_pb2.FAILURE_INVALID
        assert "512" in log[-1].chunk.error
        await fleet.submit("next", [5, 6, 7], 4)
        assert len(joined(await fleet.ended("next"))) == 4


async def test_a_job_whose_end_is_refused_is_run_again_if_the_broker_has_it_for_ours(
    broker: Broker, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has lost the claim before the end came: nobody else would run it, and no word of it comes."""
    lost = {"state": "queued", "owner": "", "attempt": "0"}
    async with running_worker(broker, model_dir, tmp_path) as fleet:
        jobs = fleet.loop._committer._jobs
        commit = jobs.commit

        async def forgetful(*told: Any) -> Committed:
            if told[2] and not fleet.metrics.get_sample_value("octavo_fenced_total"):
                await broker.call("HSET", broker.keys.job("r1"), *(each for pair in lost.items() for each in pair))
            return await commit(*told)

        monkeypatch.setattr(jobs, "commit", forgetful)
        await fleet.submit("r1", [5, 6, 7], 1)
        assert len(joined(await fleet.ended("r1"))) == 1
        assert fleet.metrics.get_sample_value("octavo_fenced_total") == 1


async def test_a_drain_finishes_what_was_accepted(broker: Broker, model_dir: Path, tmp_path: Path) -> None:
    async with running_worker(broker, model_dir, tmp_path, max_running=2) as fleet:
        for i in range(4):
            await fleet.submit(f"r{i}", [9, 8, 7 + i], 40)
        await until(lambda: read(fleet, 4), within_s=10)
        fleet.loop.drain()
        for i in range(4):
            assert len(joined(await fleet.ended(f"r{i}"))) == 40
    assert await Registry(broker).workers() == []


async def read(fleet: Fleet, jobs: int) -> bool:
    """Whether the worker has so many jobs."""
    (queue,) = await fleet.jobs.queues()
    return (queue.undelivered, queue.pending) == (0, jobs)


async def test_a_drain_reads_no_more(broker: Broker, model_dir: Path, tmp_path: Path) -> None:
    """What is not read by then is others' work: it stays in the stream as it is."""
    async with running_worker(broker, model_dir, tmp_path) as fleet:
        await fleet.submit("read", [5, 6, 7], LONG)
        await until(lambda: read(fleet, 1), within_s=10)
        fleet.loop.drain()
        await until(lambda: stopped(fleet), within_s=10)
        entry = await broker.call("XADD", broker.keys.jobs("w0"), "*", "request", "unread")
        assert len(joined(await fleet.ended("read"))) == LONG
        await until(lambda: ended(fleet), within_s=10)
        assert [each[0] for each in await broker.call("XRANGE", broker.keys.jobs("w0"), "-", "+")] == [entry]
        await broker.call("XDEL", broker.keys.jobs("w0"), entry)
    assert await Registry(broker).workers() == []


async def stopped(fleet: Fleet) -> bool:
    return fleet.loop._intake.stopped


async def test_what_has_not_ended_by_the_grace_time_is_left_as_it_is(
    broker: Broker, model_dir: Path, tmp_path: Path
) -> None:
    async with running_worker(broker, model_dir, tmp_path, grace=0.05) as fleet:
        await fleet.submit("long", [5, 6, 7], LONG, n=2)
        await fleet.tokens("long", 2)
        fleet.loop.drain()
        await until(lambda: ended(fleet), within_s=10)
        record, log = await fleet.jobs.get("long"), await fleet.log("long")
        assert record is not None
        assert record.state is JobState.RUNNING
        assert record.ends == {}
        assert {d.chunk.finish for d in log} == {0}
        assert sum(record.next.values()) == sum(len(d.chunk.token_ids) for d in log) < 2 * LONG
        assert fleet.metrics.get_sample_value("octavo_jobs_total", {"outcome": "left"}) == 1
    assert await Registry(broker).workers() == []


async def test_a_job_cancelled_before_its_first_step_is_never_run(
    broker: Broker, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_worker(broker, model_dir, tmp_path) as fleet:
        gate, in_step, added = threading.Event(), threading.Event(), []
        step, add = fleet.worker.engine.step, fleet.worker.engine.add

        def gated_step() -> StepOutput:
            in_step.set()
            assert gate.wait(20)
            return step()

        def noted_add(request: Request, *past: Any) -> None:
            added.append(request.request_id)
            add(request, *past)

        monkeypatch.setattr(fleet.worker.engine, "step", gated_step)
        monkeypatch.setattr(fleet.worker.engine, "add", noted_add)
        await fleet.submit("first", [5, 6, 7], 4)
        await asyncio.to_thread(in_step.wait, 20)
        await fleet.submit("second", [5, 6, 8], LONG)

        async def claimed() -> bool:
            record = await fleet.jobs.get("second")
            return record is not None and record.state is JobState.RUNNING

        await until(claimed, within_s=10)
        assert await fleet.jobs.cancel("second") is Finished.ENDED
        # The word reaches the worker before the answer to a question that is asked after it.
        await until(lambda: told(fleet, "second"), within_s=10)
        gate.set()
        assert len(joined(await fleet.ended("first"))) == 4
        await fleet.idle()
        assert added == ["first"]


async def told(fleet: Fleet, request_id: str) -> bool:
    return request_id in fleet.loop._intake._rung


async def test_a_job_that_another_gateway_reads_outlives_its_first_gateway(
    broker: Broker, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_worker(broker, model_dir, tmp_path, orphan_grace=0.1) as fleet:
        step = fleet.worker.engine.step

        def slow_step() -> StepOutput:
            time.sleep(0.01)  # a model that takes its time, so that the gateway dies before the jobs end
            return step()

        monkeypatch.setattr(fleet.worker.engine, "step", slow_step)
        await broker.call("DEL", broker.keys.gateway(GATEWAY))
        await Registry(broker, lease_ttl_ms=60_000).renew_gateway(OTHER_GATEWAY)
        await fleet.submit("kept", [5, 6, 7], LONG)
        await fleet.submit("left", [5, 6, 8], LONG)
        await fleet.submit("detached", [5, 6, 9], LONG, edit=detach)
        assert await fleet.submit("kept", [5, 6, 7], LONG, gateway=OTHER_GATEWAY) is Submitted.ATTACHED
        left = await fleet.ended("left")
        assert left[-1].chunk.finish == inference_pb2.ERROR
        assert left[-1].failure == job_pb2.FAILURE_UNAVAILABLE
        kept = await fleet.ended("kept")
        assert kept[-1].chunk.finish == inference_pb2.LENGTH
        assert len(joined(kept)) == LONG
        assert len(joined(await fleet.ended("detached"))) == LONG


def detach(job: job_pb2.Job) -> None:
    job.detached = True


async def test_a_worker_whose_id_was_taken_stops(broker: Broker, model_dir: Path, tmp_path: Path) -> None:
    async with running_worker(broker, model_dir, tmp_path, ends_with=LeaseLostError) as fleet:
        await broker.call("HSET", broker.keys.worker("w0"), "incarnation", "someone else")
        await until(lambda: ended(fleet), within_s=10)


async def ended(fleet: Fleet) -> bool:
    return fleet.running.done()


async def test_a_drain_ends_when_redis_is_away(model_dir: Path, tmp_path: Path, namespace: str) -> None:
    async with EmbeddedBroker() as server:
        broker = await connect(BrokerConfig(server.url, namespace, retries=0))
        async with running_worker(broker, model_dir, tmp_path, grace=0.2, ends_with=StuckError) as fleet:
            await fleet.submit("long", [5, 6, 7], LONG)
            await fleet.tokens("long", 1)
            await server.stop()
            fleet.loop.drain()
            await until(lambda: ended(fleet), within_s=15)
        await broker.close()
