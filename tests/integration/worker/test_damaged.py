"""A worker, and what somebody writes into Redis while it runs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import BrokerError
from kvstore.registry import ModelCard, Registry
from octavo.v1 import inference_pb2, job_pb2
from tests.integration.worker.one_worker import LONG, OTHER_GATEWAY, Fleet, joined, running_worker

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.client import Broker
    from worker.step import StepOutput

TOKENS = 60


def slow_down(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that takes its time, so that something happens before its jobs end."""
    step = fleet.worker.engine.step

    def slow_step() -> StepOutput:
        time.sleep(0.01)
        return step()

    monkeypatch.setattr(fleet.worker.engine, "step", slow_step)


@pytest.mark.parametrize(("field", "value"), [("next:0", "junk"), ("attempt", "9" * 30), ("choices", "7")])
async def test_a_job_that_is_damaged_while_it_runs_takes_nothing_along(
    broker: Broker, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: str
) -> None:
    async with running_worker(broker, model_dir, tmp_path) as fleet:
        slow_down(fleet, monkeypatch)
        for request_id in ("good", "bad"):
            await fleet.submit(request_id, [5, 6, 7], TOKENS)
        await fleet.tokens("bad", 2)
        key = broker.keys.job("bad")
        await broker.call("HSET", key, field, value)
        assert len(joined(await fleet.ended("good"))) == TOKENS
        await fleet.idle()
        *_, last = await fleet.log("bad")
        assert (last.chunk.finish, last.failure) == (inference_pb2.ERROR, job_pb2.FAILURE_INTERNAL)
        assert last.chunk.error.startswith("the job in the broker is damaged: ")
        assert await broker.call("HGET", key, "state") == b"ended"
        assert not fleet.running.done()
        assert [(each.undelivered, each.pending) for each in await fleet.jobs.queues()] == [(0, 0)]


async def test_a_card_that_can_not_be_written_keeps_no_job_of_a_dead_gateway(
    broker: Broker, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(_self: Registry, _card: ModelCard) -> None:
        raise BrokerError("a card that Redis does not take")

    monkeypatch.setattr(Registry, "publish_model", refused)
    async with running_worker(broker, model_dir, tmp_path, orphan_grace=0.0) as fleet:
        slow_down(fleet, monkeypatch)
        await fleet.submit("left", [5, 6, 7], LONG, gateway=OTHER_GATEWAY)
        *_, last = await fleet.ended("left")
        assert (last.failure, last.chunk.error) == (
            job_pb2.FAILURE_UNAVAILABLE,
            "the gateway that served this job died",
        )
