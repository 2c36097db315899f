"""What a job may ask for beyond its tokens: several choices, log-probabilities, ends of its own, through the broker."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from kvstore.jobs import Finished, JobState
from octavo.v1 import inference_pb2, job_pb2
from tests.integration.worker.one_worker import LONG, by_choice, joined, running_worker
from tests.support.waiting import until
from worker.intake import READ_AHEAD

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.client import Broker

PROMPT = list(range(5, 38))


def ends(log: list[job_pb2.Delivery]) -> list[job_pb2.Delivery]:
    return [delivery for delivery in log if delivery.chunk.finish]


async def test_every_choice_has_its_own_answer_and_end(broker: Broker, model_dir: Path, tmp_path: Path) -> None:
    async with running_worker(broker, model_dir, tmp_path) as fleet:
        await fleet.submit("four", PROMPT, 12, seed=7, n=4)
        log = await fleet.ended("four")
        answers = by_choice(log)
        assert [len(tokens) for tokens in answers.values()] == [12] * 4
        assert len({tuple(tokens) for tokens in answers.values()}) == 4
        assert [delivery.HasField("route") for delivery in log] == [True] + [False] * 47
        assert [delivery.HasField("usage") for delivery in log] == [bool(delivery.chunk.finish) for delivery in log]
        assert ends(log)[-1].usage == inference_pb2.Usage(prompt_tokens=33, completion_tokens=48, attempts=1)
        await fleet.submit("one", PROMPT, 12, seed=7)
        assert joined(await fleet.ended("one")) == answers[0]
        await fleet.idle()
        assert fleet.metrics.get_sample_value("octavo_jobs_total", {"outcome": "length"}) == 2


async def test_choices_beside_other_jobs_are_those_of_a_job_alone(
    broker: Broker, model_dir: Path, tmp_path: Path
) -> None:
    async with running_worker(broker, model_dir, tmp_path, max_running=6) as fleet:
        for turn in ("alone", "together"):
            for index in range(6):
                await fleet.submit(f"{turn}-{index}", PROMPT[index:], 15, seed=index, n=1 + index % 4)
                if turn == "alone":
                    await fleet.ended(f"alone-{index}")
        for index in range(6):
            together = by_choice(await fleet.ended(f"together-{index}"))
            assert together == by_choice(await fleet.ended(f"alone-{index}"))
            assert sorted(together) == list(range(1 + index % 4))
        await fleet.idle()


async def test_log_probabilities_of_output_and_prompt(broker: Broker, model_dir: Path, tmp_path: Path) -> None:
    def wanted(job: job_pb2.Job) -> None:
        job.logprobs, job.prompt_logprobs = 3, 0

    async with running_worker(broker, model_dir, tmp_path) as fleet:
        await fleet.submit("warm", PROMPT, 4)
        await fleet.ended("warm")
        logs = []
        for name in ("first", "second"):
            await fleet.submit(name, PROMPT, 6, n=2, edit=wanted)
            logs.append(await fleet.ended(name))
        for log in logs:
            by_choice(log)
            for delivery in log:
                chunk = delivery.chunk
                assert [each.token_id for each in chunk.logprobs] == list(chunk.token_ids)
                for each in chunk.logprobs:  # greedy: the token is the likeliest
                    assert len(each.top) == 3
                    assert (each.top[0].token_id, each.top[0].logprob) == (each.token_id, each.logprob)
            scored = {(d.chunk.choice, d.chunk.start): len(d.chunk.prompt_logprobs) for d in log}
            assert {place: count for place, count in scored.items() if count} == {(0, 0): len(PROMPT) - 1}
            assert [each.token_id for each in log[0].chunk.prompt_logprobs] == PROMPT[1:]
        assert [d.chunk for d in logs[0]] == [d.chunk for d in logs[1]]


async def test_what_a_job_asks_of_sampling_and_stopping_reaches_the_model(
    broker: Broker, model_dir: Path, tmp_path: Path
) -> None:
    async with running_worker(broker, model_dir, tmp_path) as fleet:

        def stop_at(job: job_pb2.Job, token: int, min_tokens: int) -> None:
            job.sampling.logit_bias[token] = 100.0
            job.stopping.stop_token_ids.append(token)
            job.stopping.min_tokens = min_tokens

        await fleet.submit("stop", PROMPT, 12, edit=partial(stop_at, token=99, min_tokens=3))
        log = await fleet.ended("stop")
        assert [len(tokens) for tokens in by_choice(log).values()] == [4]
        assert (log[-1].chunk.finish, log[-1].chunk.stop_token) == (inference_pb2.STOP, 99)
        assert 99 not in joined(log)[:3]

        def penalized(job: job_pb2.Job) -> None:
            job.sampling.logit_bias[99] = 50.0
            job.sampling.frequency_penalty = 2.0
            job.sampling.presence_penalty = 2.0
            job.sampling.logit_bias[98] = 45.0

        await fleet.submit("penalized", PROMPT, 8, edit=penalized)
        # 99 leads by 5 or so; as it is said its penalties grow, and the two take turns.
        assert set(joined(await fleet.ended("penalized"))) == {98, 99}


@pytest.mark.parametrize("max_running", [2, 8])
async def test_a_cancelled_job_ends_all_choices(
    broker: Broker, model_dir: Path, tmp_path: Path, max_running: int
) -> None:
    async with running_worker(broker, model_dir, tmp_path, max_running=max_running) as fleet:
        await fleet.submit("many", PROMPT, LONG - len(PROMPT), seed=1, n=5)
        await fleet.tokens("many", 12)
        assert await fleet.jobs.cancel("many") is Finished.ENDED
        await fleet.idle()
        assert [delivery.chunk.finish for delivery in ends(await fleet.log("many"))] == [inference_pb2.CANCELLED]
        await fleet.submit("next", PROMPT, 4)
        assert len(joined(await fleet.ended("next"))) == 4


async def test_a_choice_that_has_ended_keeps_its_end_when_the_others_are_cancelled(
    broker: Broker, model_dir: Path, tmp_path: Path
) -> None:
    async with running_worker(broker, model_dir, tmp_path) as fleet:
        await fleet.submit("look", PROMPT, 40, seed=3, n=2)
        first, second = by_choice(await fleet.ended("look")).values()
        # A token that ends the second choice, and the first one not for a while.
        stop = next(token for token in second[:20] if token not in first)

        def stop_second(job: job_pb2.Job) -> None:
            job.stopping.stop_token_ids.append(stop)
            job.stopping.max_tokens = 400

        await fleet.submit("half", PROMPT, 400, seed=3, n=2, edit=stop_second)

        async def one_has_ended() -> bool:
            return len(ends(await fleet.log("half"))) == 1

        await until(one_has_ended, within_s=20)
        record = await fleet.jobs.get("half")
        assert record is not None
        assert record.state is JobState.RUNNING
        assert await fleet.jobs.cancel("half") is Finished.ENDED
        await fleet.idle()
        stopped, cancelled = ends(await fleet.log("half"))
        assert (stopped.chunk.choice, stopped.chunk.finish) == (1, inference_pb2.STOP)
        assert cancelled.chunk.finish == inference_pb2.CANCELLED


async def test_a_deadline_ends_every_choice(broker: Broker, model_dir: Path, tmp_path: Path) -> None:
    async with running_worker(broker, model_dir, tmp_path, max_running=2) as fleet:
        await fleet.submit("late", PROMPT, LONG - len(PROMPT), seed=1, n=3, deadline_ms=100)
        log = await fleet.ended("late")
        assert sorted(delivery.chunk.choice for delivery in ends(log)) == [0, 1, 2]
        assert {delivery.failure for delivery in ends(log)} == {job_pb2.FAILURE_DEADLINE}
        said = sum(len(delivery.chunk.token_ids) for delivery in log)
        assert [delivery.usage.completion_tokens for delivery in ends(log)] == [said] * 3
        await fleet.idle()


async def test_a_job_that_the_engine_refuses_ends_every_choice(broker: Broker, model_dir: Path, tmp_path: Path) -> None:
    async with running_worker(broker, model_dir, tmp_path) as fleet:
        await fleet.submit("huge", [5] * 600, 4, n=3)
        log = await fleet.ended("huge")
        assert [(delivery.chunk.choice, delivery.failure) for delivery in log] == [
            (choice, job_pb2.FAILURE_INVALID) for choice in range(3)
        ]
        assert len({delivery.chunk.error for delivery in log}) == 1


async def test_choices_take_room_like_jobs(broker: Broker, model_dir: Path, tmp_path: Path) -> None:
    jobs = [f"j{index}" for index in range((4 + READ_AHEAD) // 4)]
    async with running_worker(broker, model_dir, tmp_path, max_running=4) as fleet:
        for name in jobs:
            await fleet.submit(name, PROMPT, LONG - len(PROMPT), seed=1, n=4)

        async def all_are_claimed() -> bool:
            (queue,) = await fleet.jobs.queues()
            return (queue.undelivered, queue.pending) == (0, len(jobs))

        await until(all_are_claimed, within_s=20)
        await fleet.submit("next", PROMPT, 4)
        await fleet.tokens("j0", 80)
        (queue,) = await fleet.jobs.queues()
        assert (queue.undelivered, queue.pending) == (1, len(jobs))
        for name in jobs:
            await fleet.jobs.cancel(name)
        assert len(joined(await fleet.ended("next"))) == 4


async def test_cached_tokens_stay_under_their_limit(broker: Broker, model_dir: Path, tmp_path: Path) -> None:
    async with running_worker(broker, model_dir, tmp_path, cache_tokens=64) as fleet:
        for index in range(3):
            await fleet.submit(f"r{index}", [index + 5, *PROMPT], 20)
            await fleet.ended(f"r{index}")
        await fleet.idle()
        assert fleet.worker.engine.stats().blocks_cached == 4
        sample = fleet.metrics.get_sample_value
        stored = sample("octavo_pool_events_total", {"kind": "stored"})
        evicted = sample("octavo_pool_events_total", {"kind": "evicted"})
        assert (stored, evicted) == (9, 5)
