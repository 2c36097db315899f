"""Callers who are told to come back, and what becomes of their jobs meanwhile: theirs end, nobody else's does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from gateway import ending
from kvstore.errors import BrokerUnreachable
from kvstore.jobs import Finished, Jobs, JobState
from kvstore.prefix_index import PrefixIndex
from kvstore.registry import Registry
from octavo.v1.inference_pb2 import CANCELLED
from tests.integration.gateway.harness import Client, chunks, collect, failure, request, running_gateway, tokens
from tests.integration.gateway.scripted import chunk
from tests.support.waiting import until

if TYPE_CHECKING:
    from gateway.server import Gateway
    from kvstore.client import Broker
    from tests.integration.gateway.scripted import ScriptedWorker

TRY_AGAIN = (grpc.StatusCode.UNAVAILABLE, "the broker does not answer; try again")


class Trouble:
    """Of methods that reach the broker: what they are to lose, and how they went."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.finished: asyncio.Queue[Finished] = asyncio.Queue()
        self.may_finish = asyncio.Event()
        self.may_finish.set()
        self.finishing = asyncio.Event()
        finish = Jobs.finish

        async def watched(jobs: Jobs, *args: Any, **named: Any) -> Finished:
            self.finishing.set()
            await self.may_finish.wait()
            done = await finish(jobs, *args, **named)
            self.finished.put_nowait(done)
            return done

        monkeypatch.setattr(Jobs, "finish", watched)

    def lose(self, owner: type, method: str, *, done: bool) -> None:
        """The next call of the method fails, once it has done its work or before."""
        real = getattr(owner, method)

        async def failing(*args: Any, **named: Any) -> Any:
            self.monkeypatch.setattr(owner, method, real)
            if done:
                await real(*args, **named)
            raise BrokerUnreachable("lost")

        self.monkeypatch.setattr(owner, method, failing)

    def callers_return_within(self, seconds: float) -> None:
        self.monkeypatch.setattr(ending, "RETURN_S", seconds)

    async def one_finish(self) -> Finished:
        """How the next attempt to end a job went."""
        return await asyncio.wait_for(self.finished.get(), 3)


async def nobody_ends_jobs() -> bool:
    return not any(task.get_name().startswith("end ") for task in asyncio.all_tasks())


@pytest.fixture
def trouble(monkeypatch: pytest.MonkeyPatch) -> Trouble:
    return Trouble(monkeypatch)


async def test_what_ends_a_callers_job_does_not_end_it_for_one_who_came_later(
    worker: ScriptedWorker, client: Client, trouble: Trouble
) -> None:
    """At the same gateway, while the end is on its way."""
    first = client.generate(request("r1"))
    (claim,) = await worker.claim()
    trouble.may_finish.clear()
    first.cancel()
    await asyncio.wait_for(trouble.finishing.wait(), 3)
    second = client.generate(request("r1"))
    await second.initial_metadata()
    trouble.may_finish.set()
    assert await trouble.one_finish() is Finished.FENCED
    await worker.answer(claim)
    assert tokens(await collect(second)) == [2, 3, 4]


async def test_who_comes_back_finds_the_job(worker: ScriptedWorker, client: Client, trouble: Trouble) -> None:
    trouble.callers_return_within(0.3)
    trouble.lose(Jobs, "submit", done=True)
    assert await failure(client.generate(request("r1"))) == TRY_AGAIN
    again = client.generate(request("r1"))
    (claim,) = await worker.claim()
    # The time to come back passes while the second call waits: its job is left to it.
    await again.initial_metadata()
    await until(nobody_ends_jobs, within_s=3)
    assert trouble.finished.empty()
    await worker.answer(claim)
    assert tokens(await collect(again)) == [2, 3, 4]


async def test_the_job_of_a_caller_who_does_not_come_back_ends(
    worker: ScriptedWorker, client: Client, trouble: Trouble
) -> None:
    trouble.callers_return_within(0.2)
    trouble.lose(Jobs, "submit", done=True)
    assert await failure(client.generate(request("r1"))) == TRY_AGAIN
    record = await worker.jobs.get("r1")
    assert record is not None
    assert record.state is JobState.QUEUED
    assert await trouble.one_finish() is Finished.ENDED
    record = await worker.jobs.get("r1")
    assert record is not None
    assert record.finish == CANCELLED


@pytest.mark.parametrize("done", [True, False])
async def test_an_attach_that_failed_ends_nothing_while_its_caller_may_come_back(
    worker: ScriptedWorker, client: Client, trouble: Trouble, done: bool
) -> None:
    trouble.callers_return_within(60)
    trouble.lose(Jobs, "submit", done=True)
    assert await failure(client.generate(request("r1"))) == TRY_AGAIN
    trouble.lose(Jobs, "attach", done=done)
    assert await failure(client.generate(request("r1"))) == TRY_AGAIN
    assert not trouble.finishing.is_set()
    again = client.generate(request("r1"))
    (claim,) = await worker.claim()
    await worker.answer(claim)
    assert tokens(await collect(again)) == [2, 3, 4]


async def test_a_job_whose_output_is_lost_ends_once_nobody_comes_back_for_it(
    worker: ScriptedWorker, client: Client, broker: Broker, trouble: Trouble
) -> None:
    trouble.callers_return_within(0.2)
    keys = worker.broker.keys
    first = client.generate(request("r1"))
    (claim,) = await worker.claim()
    await worker.commit(chunk(claim, 0, [10]), chunk(claim, 1, [11]))
    await first.read()
    ((entry, _), _) = await worker.broker.call("XRANGE", keys.log("r1"), "-", "+")
    await worker.broker.call("XDEL", keys.log("r1"), entry)
    lost = (grpc.StatusCode.UNAVAILABLE, "the token log of choice 0 goes from index 0 to 1")
    async with running_gateway(broker) as (_, _, other):
        assert await failure(other.generate(request("r1"))) == lost
        assert await trouble.one_finish() is Finished.ENDED
    assert await worker.told_to_drop() == "r1"
    assert chunks(await collect(first))[-1].finish == CANCELLED


async def test_a_job_that_was_never_sent_is_not_ended(worker: ScriptedWorker, client: Client, trouble: Trouble) -> None:
    trouble.callers_return_within(0)
    trouble.lose(PrefixIndex, "match", done=False)
    trouble.lose(Registry, "loads", done=False)
    assert await failure(client.generate(request("r1"))) == TRY_AGAIN
    await until(nobody_ends_jobs, within_s=3)
    assert not trouble.finishing.is_set()
    assert await worker.jobs.get("r1") is None


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_the_last_of_several_callers_ends_the_job(
    worker: ScriptedWorker, gateway: Gateway, client: Client, trouble: Trouble, order: tuple[int, int]
) -> None:
    """Whichever of them asked for it last."""
    calls = [client.generate(request("r1"))]
    await calls[0].initial_metadata()
    calls.append(client.generate(request("r1")))
    await calls[1].initial_metadata()
    await worker.claim()
    calls[order[0]].cancel()

    async def one_has_left() -> bool:
        return len(gateway._relay) == 1 and await nobody_ends_jobs()

    await until(one_has_left, within_s=3)
    assert not trouble.finishing.is_set()
    calls[order[1]].cancel()
    assert await worker.told_to_drop() == "r1"
