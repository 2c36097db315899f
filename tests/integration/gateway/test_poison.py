"""A job that kills its workers takes nobody with it, however many ran beside it when it struck first."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc

from gateway.tasks import Tasks
from octavo.v1 import fleet_pb2
from tests.integration.gateway.harness import answers, collect, failed_stream, request, running_gateway
from tests.integration.gateway.scripted import ScriptedWorker

if TYPE_CHECKING:
    from kvstore.client import Broker

POISON, DEAD = "r3", {"outcome": "dead"}


class Mortal:
    """Lives of a worker, one after the other. Each ends with the poison, and with all that it has claimed by then."""

    def __init__(self, broker: Broker, name: str, deaths: list[list[str]]) -> None:
        """`deaths`: is told what each life had claimed when it ended."""
        self._broker = broker
        self._deaths = deaths
        self.lives = [ScriptedWorker(broker, name)]

    async def run(self) -> None:
        while True:
            worker = self.lives[-1]
            claims = await worker.claim_all()
            claimed = [claim.job.request_id for claim in claims]
            if POISON in claimed:
                self._deaths.append(claimed)
                await worker.die()
                self.lives.append(ScriptedWorker(self._broker, worker.info.id))
                await self.lives[-1].start()
                continue
            for claim in claims:
                await worker.answer(claim)


async def test_of_a_burst_with_one_poison_all_others_finish(broker: Broker) -> None:
    """Eight jobs at two workers, and two gateways that move what is left of the dead ones."""
    deaths: list[list[str]] = []
    mortals, tasks = [Mortal(broker, name, deaths) for name in ("w0", "w1")], Tasks()
    for each in mortals:
        await each.lives[0].start()
    async with running_gateway(broker) as (one, _, client), running_gateway(broker) as (two, _, _):
        calls = {f"r{number}": client.generate(request(f"r{number}")) for number in range(8)}
        for call in calls.values():
            await call.initial_metadata()
        for each in mortals:
            tasks.spawn(each.run(), name="lives")
        async with asyncio.timeout(40):
            _, code, message = await failed_stream(calls.pop(POISON))
            finished = {request_id: await collect(call) for request_id, call in calls.items()}
        assert (code, message) == (grpc.StatusCode.INTERNAL, "3 workers died while they ran it")
        assert [answers(each, 1) for each in finished.values()] == [[[2, 3, 4]]] * 7
        # Those that were with it when it struck ran once more each time; from the second death on it was alone.
        assert len(deaths[0]) > 1
        assert (len(deaths), deaths[2]) == (3, [POISON])
        attempts = {request_id: each[-1].usage.attempts for request_id, each in finished.items()}
        assert attempts == {request_id: 1 + sum(request_id in each for each in deaths) for request_id in finished}
        told = await client.ledger(fleet_pb2.LedgerRequest())
        assert (told.accepted, told.finished, told.dead, told.in_flight) == (8, 7, 1, 0)
        counted = [each.metrics.registry.get_sample_value("octavo_rehomed_total", DEAD) for each in (one, two)]
        assert sorted(filter(None, counted)) == [1.0]
        await tasks.cancel()
        for each in mortals:
            for life in each.lives:
                await life.stop()
