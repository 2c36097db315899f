"""What a script without its check lets through is found: by the log alone, as no client would see it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from bench.chaos.checker import check
from bench.chaos.evidence import Rules, Run
from bench.chaos.snapshot import snapshot
from kvstore.embedded import find_server
from kvstore.jobs import Commit, Jobs
from kvstore.registry import Registry, WorkerInfo, new_incarnation
from kvstore.scripts import Script
from octavo.v1 import inference_pb2, job_pb2

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.client import Broker

CHECK = re.compile(r"if seen\.err or seen\[2\] ~= attempt or seen\[3\] ~= incarnation then")
"""Of commit.lua: whose attempt it is."""


@pytest.fixture(scope="session")
def broker_binary() -> Path:
    """One kind of server is enough here."""
    return find_server()


def chunk(attempt: int, start: int, finish: int = 0) -> job_pb2.Delivery:
    body = inference_pb2.Chunk(start=start, token_ids=[start + 2], text="x", finish=finish)
    return job_pb2.Delivery(request_id="r", attempt=attempt, chunk=body)


async def two_attempts(broker: Broker) -> list[Commit]:
    """A worker is frozen after its first token, its job goes on elsewhere, it wakes up and writes; what that gave."""
    jobs = Jobs(broker)
    frozen, other = (
        WorkerInfo(id="w0", incarnation=new_incarnation(), model="m", fingerprint="f", context_length=64)
        for _ in range(2)
    )
    await Registry(broker).register(frozen)
    job = job_pb2.Job(
        request_id="r", model="m", prompt_token_ids=[1], stopping=inference_pb2.Stopping(max_tokens=9), n=1
    )
    await jobs.submit(
        job,
        digest=b"d",
        worker="w0",
        worker_incarnation=frozen.incarnation,
        gateway="g",
        deadline_ms=None,
        max_queue=9,
    )
    reader = broker.blocking()
    entries = []
    while not entries:  # the first read makes the group
        entries = await jobs.next_entries(reader, "w0", frozen.incarnation, 9, 200)
    assert len(await jobs.claim("w0", frozen.incarnation, entries)) == 1
    await reader.aclose()
    assert await commit(jobs, frozen, chunk(1, 0)) == Commit.WRITTEN
    # What a claim by somebody else does.
    keys, names = broker.keys, {"attempt": 2, "owner": other.incarnation, "worker_incarnation": other.incarnation}
    await broker.call("HSET", keys.job("r"), *(word for pair in names.items() for word in pair))
    await broker.call("RENAME", keys.load("w0", frozen.incarnation), keys.load("w0", other.incarnation))
    assert await commit(jobs, other, chunk(2, 1)) == Commit.WRITTEN
    late = [await commit(jobs, frozen, chunk(1, 2))]
    late.append(await commit(jobs, other, chunk(2, 3 if late == [Commit.WRITTEN] else 2, inference_pb2.STOP)))
    return late


async def commit(jobs: Jobs, worker: WorkerInfo, delivery: job_pb2.Delivery) -> Commit:
    committed = await jobs.commit(worker.id, worker.incarnation, [delivery])
    (outcome,) = committed.outcomes
    return outcome


async def found(broker: Broker) -> list[str]:
    run = Run({}, {}, await snapshot(broker))
    return [f"{each.invariant} {each.name}" for each in check(run, Rules())]


async def test_the_check_refuses_a_late_write_and_nothing_is_found(broker: Broker) -> None:
    assert await two_attempts(broker) == [Commit.FENCED, Commit.WRITTEN]
    assert await found(broker) == []


async def test_without_the_check_the_late_write_is_found(broker: Broker) -> None:
    whole = broker._scripts["commit"].source
    source, removed = CHECK.subn("if seen.err then", whole)
    assert removed == 1
    broker._scripts["commit"] = Script(source, "0" * 40, reads=False)
    assert await two_attempts(broker) == [Commit.WRITTEN, Commit.WRITTEN]
    assert await found(broker) == ["I2 late attempt"]
