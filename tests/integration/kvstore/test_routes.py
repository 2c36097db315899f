"""What comes with a job from the decision that sent it: charges, and a record of the reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.jobs import Finished, Submitted
from kvstore.records import RECORD_FIELDS
from kvstore.registry import Load
from octavo.v1 import inference_pb2

from .conftest import Stage, chunk

if TYPE_CHECKING:
    from kvstore.client import Broker


async def test_how_it_was_routed_stays_with_a_job(stage: Stage, broker: Broker) -> None:
    worker = await stage.worker()
    await stage.submit("r1", worker, prompt=range(40), prefill=8, predicted=32, route=b"reasons")
    assert (await stage.registry.loads([worker]))["w0"] == Load(1, 47, 8, 1)
    # Attaching is no new decision.
    assert await stage.submit("r1", worker, prompt=range(40), prefill=1, route=b"other") is Submitted.ATTACHED
    (claim,) = await stage.claim(worker)
    assert list(claim.job.prompt_token_ids) == [*range(40)]
    record = await stage.record("r1")
    assert (record.predicted, record.stolen_from, record.started) == (32, "", False)
    assert await stage.jobs.route("r1") == b"reasons"

    first = chunk("r1", 0, [5])
    first.route.cached_tokens, first.route.fetched_tokens = 16, 8
    await stage.commit(worker, first)
    assert (await stage.registry.loads([worker]))["w0"] == Load(1, 47, 0, 1)
    assert await stage.jobs.cancel("r1") is Finished.ENDED
    record = await stage.record("r1")
    assert (record.predicted, record.cached_tokens, record.started) == (32, 16, True)
    assert record.fetched_tokens == 8
    assert await stage.jobs.route("r1") == b"reasons"
    assert await broker.call("EXISTS", broker.keys.load("w0", worker.incarnation)) == 0
    assert [entry[1] for entry in await broker.call("XRANGE", broker.keys.routes, "-", "+")] == [{b"d": b"reasons"}]


async def test_a_prompt_is_refunded_with_whatever_comes_first(stage: Stage) -> None:
    """Tokens of any choice, an end without any, an end from outside before all."""
    worker = await stage.worker()
    for number in range(4):
        await stage.submit(f"r{number}", worker, n=2, prefill=3)
    await stage.claim(worker)
    assert (await stage.registry.loads([worker]))["w0"] == Load(4, 68, 12, 8)
    await stage.commit(worker, chunk("r0", 0, [5], choice=1), chunk("r1", 0, [], finish=inference_pb2.LENGTH))
    assert (await stage.registry.loads([worker]))["w0"] == Load(4, 68, 6, 8)
    await stage.commit(worker, chunk("r0", 0, [5], choice=0), chunk("r1", 0, [], choice=1, finish=inference_pb2.STOP))
    assert (await stage.registry.loads([worker]))["w0"] == Load(3, 51, 6, 6)
    await stage.jobs.cancel("r2")
    assert (await stage.registry.loads([worker]))["w0"] == Load(2, 34, 3, 4)


async def test_a_job_does_not_carry_its_reasons_along(stage: Stage, broker: Broker) -> None:
    """Thousands of jobs are kept for minutes, and looked at every second: a record of kilobytes is kept once."""
    worker = await stage.worker()
    await stage.submit("r1", worker, route=b"x" * 4000)
    key = broker.keys.job("r1")
    (entry,) = await broker.call("XRANGE", broker.keys.routes, "-", "+")
    assert await broker.call("HGET", key, "route") == entry[0]
    assert "route" not in RECORD_FIELDS
    stored = await broker.call("HGETALL", key)
    assert sum(len(value) for field, value in stored.items() if field != b"payload") < 500


@pytest.mark.parametrize("lost", ["trimmed", "no id", "another type", "without"])
async def test_reasons_that_are_not_kept_any_more(stage: Stage, broker: Broker, lost: str) -> None:
    worker = await stage.worker()
    await stage.submit("r1", worker, route=b"" if lost == "without" else b"reasons")
    if lost == "trimmed":
        await broker.call("XTRIM", broker.keys.routes, "MAXLEN", "=", 0)
    elif lost == "no id":
        await broker.call("HSET", broker.keys.job("r1"), "route", "reasons")
    elif lost == "another type":
        await broker.call("SET", broker.keys.routes, "x", "PX", 60_000)
    assert await stage.jobs.route("r1") == b""
    assert broker.malformed == (lost in ("no id", "another type"))
    # Nor is a job refused where they can't be kept.
    await stage.submit("r2", worker, route=b"reasons")
    assert await stage.jobs.route("r2") == (b"" if lost == "another type" else b"reasons")
    assert await stage.jobs.route("nobody") == b""
