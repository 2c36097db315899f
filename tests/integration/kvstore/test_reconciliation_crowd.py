"""Charges do not drift while many change them: loads and jobs are added up in one moment of the server."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from itertools import product
from typing import TYPE_CHECKING, Final

from octavo.v1 import inference_pb2

from .conftest import Stage, chunk, until

if TYPE_CHECKING:
    from kvstore.client import Broker
    from kvstore.registry import WorkerInfo

STOP = inference_pb2.STOP

ADD_UP: Final = """
local jobs, loads = {}, {}
for _, job in ipairs(KEYS) do
  local seen = redis.call('HMGET', job, 'state', 'worker', 'worker_incarnation', 'charge', 'prefill', 'choices')
  if seen[1] == 'queued' or seen[1] == 'running' then
    local load = ARGV[1] .. seen[2] .. ':' .. seen[3]
    local sum = jobs[load] or {0, 0, 0, 0}
    jobs[load] = {sum[1] + 1, sum[2] + seen[4], sum[3] + (seen[5] or 0), sum[4] + seen[6]}
  end
end
for i = 2, #ARGV do
  local sum = jobs[ARGV[i]] or {0, 0, 0, 0}
  local load = redis.call('HMGET', ARGV[i], 'jobs', 'tokens', 'prefill', 'sequences')
  for field = 1, 4 do
    if tonumber(load[field] or 0) ~= sum[field] then
      return ARGV[i] .. ' has ' .. cjson.encode(load) .. ', its jobs ' .. cjson.encode(sum)
    end
  end
end
return ''
"""
"""KEYS: all jobs. ARGV: what loads begin with, then all loads. What does not add up, in one moment of the server."""


async def looks_until(done: asyncio.Event, broker: Broker, jobs: list[str], loads: list[str]) -> int:
    """Adds up again and again; how often it did."""
    looks = 0
    while not done.is_set():
        answer = await broker.call("EVAL", ADD_UP, len(jobs), *jobs, broker.keys.load("", "")[:-1], *loads)
        assert answer == b""
        looks += 1
    return looks


async def test_loads_add_up_while_many_change_them(stage: Stage) -> None:
    """Gateways, workers and thieves at once, each on connections of its own."""
    broker, keys = stage.broker, stage.broker.keys
    workers = [await stage.worker(f"w{number}", prefill_tok_s=100.0, max_running=1) for number in range(3)]
    ids = [f"r{number}" for number in range(120)]
    loads = [keys.load(worker.id, worker.incarnation) for worker in workers]
    dice, done, stolen = random.Random(5), asyncio.Event(), 0
    choices = {request_id: dice.choice([1, 1, 2, 3]) for request_id in ids}

    async def gateway(mine: list[str]) -> None:
        for request_id in mine:
            prompt = dice.randrange(1, 60)
            await stage.submit(
                request_id,
                workers[0],
                n=choices[request_id],
                prompt=range(prompt),
                prefill=dice.randrange(prompt + 1),
            )
            if dice.random() < 0.2:
                await stage.jobs.cancel(dice.choice(mine))

    async def work(worker: WorkerInfo) -> None:
        async with aclosing(broker.blocking()) as reader:
            while not done.is_set():
                entries = await stage.jobs.next_entries(reader, worker.id, worker.incarnation, 3, 20)
                for claim in await stage.jobs.claim(worker.id, worker.incarnation, entries):
                    for choice, index in product(range(claim.job.n), range(3)):
                        finish = STOP if index == 2 else inference_pb2.FINISH_REASON_UNSPECIFIED
                        step = chunk(claim.job.request_id, index, [1], choice=choice, finish=finish)
                        await stage.commit(worker, step)

    async def rob(thief: WorkerInfo, victim: WorkerInfo) -> None:
        nonlocal stolen
        while not done.is_set():
            taken = stage.jobs.steal(thief.id, thief.incarnation, victim.id, prefill_s_per_token=0.001)
            stolen += await taken or 0
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(looks_until(done, broker, [keys.job(request_id) for request_id in ids], loads))
        for worker in workers:
            group.create_task(work(worker))
        for thief, victim in ((1, 0), (2, 0), (0, 1)):
            group.create_task(rob(workers[thief], workers[victim]))
        gateways = [group.create_task(gateway(ids[start::4])) for start in range(4)]
        await asyncio.wait(gateways)

        async def all_ended() -> bool:
            return not await broker.call("EXISTS", *loads)

        await until(all_ended)
        done.set()
    assert stolen > 0
    assert watching.result() > 10
    assert {(await stage.record(request_id)).state for request_id in ids} == {"ended"}
