"""A worker whose queue somebody floods by hand, beyond all that gateways let through, goes on serving."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvstore.jobs import Jobs
from octavo.v1 import inference_pb2, job_pb2
from octavo.v1.inference_pb2 import GenerateRequest, Sampling, Stopping, TokenIds

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.client import Broker
    from ops.client import Client
    from tests.integration.worker.one_worker import Fleet


def stops(count: int, size: int) -> Callable[[job_pb2.Job], None]:
    return lambda job: job.stopping.stop.extend("x" * size for _ in range(count))


def biases(count: int) -> Callable[[job_pb2.Job], None]:
    return lambda job: job.sampling.logit_bias.update(dict.fromkeys(range(count), 1.0))


FLOOD: tuple[tuple[Callable[[job_pb2.Job], None], str], ...] = (
    (stops(50, 20_000), "its payload has 1000"),
    (stops(16, 1000), "stopping.stop (bytes of one) is 1000, of 256 at most"),
    (stops(50, 100), "stopping.stop (strings) is 50, of 16 at most"),
    (biases(4097), "sampling.logit_bias (entries) is 4097, of 4096 at most"),
    (lambda job: job.stopping.stop_token_ids.extend(range(65)), "stopping.stop_token_ids (ids) is 65, of 64 at most"),
)


async def by_hand(broker: Broker, fleet: Fleet, request_id: str, edit: Callable[[job_pb2.Job], None]) -> None:
    """Writes a job as a gateway does, but for its checks."""
    job = job_pb2.Job(request_id=request_id, model="tiny", prompt_token_ids=[5, 6, 7], n=1)
    job.sampling.MergeFrom(Sampling(temperature=0, top_p=1, repetition_penalty=1))
    job.stopping.max_tokens = 400
    edit(job)
    keys, info = broker.keys, fleet.worker.info
    names = [keys.job(request_id), keys.log(request_id), keys.jobs(info.id), keys.worker(info.id)]
    names += [keys.load(info.id, info.incarnation), keys.routes]
    args = [job.SerializeToString(), b"digest", request_id, info.id, info.incarnation, "", "", 1000, 403, 3, 1]
    assert await broker.script("submit", names, [*args, 3, 0, "", 0, 0, "", "", "", "", ""]) == [b"accepted"]


async def test_a_flood_of_jobs_that_no_gateway_wrote_harms_nobody(broker: Broker, fleet: Fleet, client: Client) -> None:
    request = GenerateRequest(
        token_ids=TokenIds(ids=[9, 8, 7]), sampling=Sampling(temperature=0), stopping=Stopping(max_tokens=60)
    )
    alone = await client.generate(request)
    began = asyncio.Event()
    beside = asyncio.create_task(client.generate(request, on_response=lambda *_: began.set()))
    await began.wait()
    for index in range(20):
        edit, _ = FLOOD[index % len(FLOOD)]
        await by_hand(broker, fleet, f"hand-{index}", edit)
    after = await client.generate(request)
    assert (await beside).token_ids == after.token_ids == alone.token_ids
    for index in range(20):
        (delivery,) = await fleet.ended(f"hand-{index}")
        assert (delivery.chunk.finish, delivery.failure) == (inference_pb2.ERROR, job_pb2.FAILURE_INTERNAL)
        reason = FLOOD[index % len(FLOOD)][1]
        assert delivery.chunk.error.startswith(f"the job in the broker is damaged: {reason}")
    assert [(each.undelivered, each.pending) for each in await Jobs(broker).queues()] == [(0, 0)]
    await fleet.idle()
