"""Keys and tenants at a gateway: who may call, and that nobody learns, stops or takes over what is another tenant's."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway import client as product
from gateway.access import Access
from kvstore.api_keys import ApiKey, RedisKeys, digest_of, entry_of, limits_of
from kvstore.errors import NoKeyFile, RequestIdTaken
from kvstore.jobs import JobState
from kvstore.key_file import KeyFile
from kvstore.tenants import Quota
from octavo.v1 import fleet_pb2, inference_pb2
from tests.integration.gateway.harness import Client, collect, failure, request, running_gateway, tokens
from tests.integration.gateway.scripted import chunk
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from gateway.server import Ready
    from kvstore.api_keys import KeyStore
    from kvstore.client import Broker
    from tests.integration.gateway.scripted import ScriptedWorker

Code = grpc.StatusCode
NOBODY = (
    Code.UNAUTHENTICATED,
    "an API key is needed: send 'authorization: Bearer KEY', as metadata by gRPC, as a header by HTTP",
)
UNKNOWN_KEY = (Code.UNAUTHENTICATED, "the API key is not known: it is wrong, or was revoked")
OPERATORS = (Code.PERMISSION_DENIED, "this call is for operators: `octavo keys add --operator` makes a key for it")
UNKNOWN_JOB = (Code.NOT_FOUND, "job 'r1' is unknown, or ended too long ago")


@dataclass
class House:
    """A gateway with keys: `acme`, `other`, and `boss`, an operator's."""

    store: KeyStore
    ready: Ready
    acme: Client
    other: Client
    boss: Client
    anybody: Client


@asynccontextmanager
async def house(broker: Broker, store: KeyStore, keys: str) -> AsyncIterator[House]:
    for name in ("acme", "other", "boss"):
        await store.put(entry_of(ApiKey(digest_of(f"key of {name}"), name, operator=name == "boss")))
    async with running_gateway(broker, keys=keys) as (_, ready, anybody):
        clients = [Client(ready.grpc, Access(api_key=f"key of {name}")) for name in ("acme", "other", "boss")]
        try:
            yield House(store, ready, *clients, anybody)
        finally:
            for client in clients:
                await client.channel.close()


@pytest.fixture
async def door(broker: Broker, worker: ScriptedWorker, tmp_path: Path) -> AsyncIterator[House]:
    """Keys in a file."""
    async with house(broker, KeyFile(tmp_path / "keys"), str(tmp_path / "keys")) as found:
        yield found


@pytest.fixture(params=["file", "redis"])
async def doors(
    request: pytest.FixtureRequest, broker: Broker, worker: ScriptedWorker, tmp_path: Path
) -> AsyncIterator[House]:
    """Keys in a file, and in the broker."""
    path = tmp_path / "keys"
    store, keys = (KeyFile(path), str(path)) if request.param == "file" else (RedisKeys(broker), "redis")
    async with house(broker, store, keys) as found:
        yield found
    await broker.call("DEL", broker.keys.api_keys)


async def begun(client: Client, worker: ScriptedWorker, **fields: Any) -> tuple[Any, Any]:
    """A call that is under way as `r1`, and the claim of its job."""
    call = client.generate(request("r1", **fields))
    (claim,) = await worker.claim()
    await worker.commit(chunk(claim, 0, [10]))
    return call, claim


async def test_nobody_comes_in_without_a_key(door: House) -> None:
    attach, cancel = inference_pb2.AttachRequest(request_id="r1"), inference_pb2.CancelRequest(request_id="r1")
    wrong = Client(door.ready.grpc, Access(api_key="key of nobody"))
    for client, told in ((door.anybody, NOBODY), (wrong, UNKNOWN_KEY)):
        for call in (
            client.generate(request("r1")),
            client.attach(attach),
            client.cancel(cancel),
            client.get_model(inference_pb2.GetModelRequest()),
            client.explain(fleet_pb2.ExplainRequest(request_id="r1")),
            client.list_workers(fleet_pb2.ListWorkersRequest()),
            client.get_queues(fleet_pb2.GetQueuesRequest()),
            client.ledger(fleet_pb2.LedgerRequest()),
            client.list_dead(fleet_pb2.ListDeadRequest()),
            client.retry_dead(fleet_pb2.RetryDeadRequest(request_id="r1")),
            client.drop_dead(fleet_pb2.DropDeadRequest()),
        ):
            assert await failure(call) == told
    await wrong.channel.close()
    # Whether it serves may be asked by whoever reaches it.
    health: Any = health_pb2_grpc.HealthStub(door.anybody.channel)
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING


async def test_who_has_no_key_is_refused_before_there_is_a_request(door: House) -> None:
    """Else whoever reaches the port could have any number of calls held open, and megabytes of requests with them."""
    for method in ("Inference/Generate", "Inference/Cancel", "Fleet/Ledger"):
        call = door.anybody.channel.stream_stream(f"/octavo.v1.{method}")()
        assert await asyncio.wait_for(call.code(), 5) is NOBODY[0]
        assert await call.details() == NOBODY[1]


async def test_who_names_a_tenant_must_be_an_operator_and_name_one(door: House, worker: ScriptedWorker) -> None:
    for key, tenant, code, told in (
        ("acme", "other", Code.PERMISSION_DENIED, "octavo-tenant is for operators"),
        ("boss", "a/b", Code.INVALID_ARGUMENT, "octavo-tenant is 'a/b': must be one name, of 1 to 64 characters"),
    ):
        client = Client(door.ready.grpc, Access(api_key=f"key of {key}", tenant=tenant))
        refused = await failure(client.generate(request("r1")))
        await client.channel.close()
        assert (refused[0], refused[1][: len(told)]) == (code, told)
    boss = Client(door.ready.grpc, Access(api_key="key of boss", tenant="acme"))
    await begun(boss, worker)
    code, _ = await failure(door.acme.generate(request("r1", prompt=(9,))))
    assert code is Code.ALREADY_EXISTS
    await boss.channel.close()


async def test_a_tenant_goes_before_others_only_where_it_may(door: House, worker: ScriptedWorker) -> None:
    told = (
        "priority is 2; requests of tenant acme may have 0 at most: `octavo keys limit acme --max-priority 2` allows it"
    )
    assert await failure(door.acme.generate(request("r1", priority=2))) == (Code.PERMISSION_DENIED, told)
    _, claim = await begun(door.boss, worker, priority=2)
    assert claim.job.priority == 2


async def test_the_whole_fleet_is_for_operators(door: House) -> None:
    for client, expected in ((door.acme, OPERATORS), (door.boss, None)):
        for call in (
            client.list_workers(fleet_pb2.ListWorkersRequest()),
            client.get_queues(fleet_pb2.GetQueuesRequest()),
            client.ledger(fleet_pb2.LedgerRequest()),
            client.list_dead(fleet_pb2.ListDeadRequest()),
            client.drop_dead(fleet_pb2.DropDeadRequest()),
        ):
            if expected is None:
                await call
            else:
                assert await failure(call) == expected
    assert await failure(door.acme.retry_dead(fleet_pb2.RetryDeadRequest(request_id="r1"))) == OPERATORS
    for client in (door.acme, door.boss):
        assert (await client.get_model(inference_pb2.GetModelRequest())).name == "tiny"


async def test_another_tenants_job_is_as_unknown_as_none(door: House, worker: ScriptedWorker) -> None:
    call, claim = await begun(door.acme, worker)
    assert claim.job.request_id == "acme/r1"
    attach, cancel = inference_pb2.AttachRequest(request_id="r1"), inference_pb2.CancelRequest(request_id="r1")
    explain = fleet_pb2.ExplainRequest(request_id="r1")
    for watch in (False, True):
        attach.watch = watch
        assert await failure(door.other.attach(attach)) == UNKNOWN_JOB
    assert await failure(door.other.explain(explain)) == UNKNOWN_JOB
    assert not (await door.other.cancel(cancel)).cancelled
    for name in ("acme/r1", "../acme/r1"):
        named = inference_pb2.AttachRequest(request_id=name)
        assert (await failure(door.other.attach(named)))[0] is Code.INVALID_ARGUMENT
        assert (await failure(door.other.generate(request(name))))[0] is Code.INVALID_ARGUMENT
    named = fleet_pb2.ExplainRequest(request_id="acme/r1")
    assert (await failure(door.other.explain(named)))[0] is Code.NOT_FOUND
    # It goes on, and its own tenant knows it.
    assert (await door.acme.explain(explain)).worker == "w0"
    assert (await door.boss.explain(named)).worker == "w0"
    assert await failure(door.boss.explain(explain)) == UNKNOWN_JOB
    attach.watch = True
    onlooker = door.acme.attach(attach)
    await onlooker.initial_metadata()
    await worker.commit(chunk(claim, 1, [11], finish=inference_pb2.STOP))
    for each in (call, onlooker):
        responses = await collect(each)
        assert tokens(responses) == [10, 11]
        assert {response.request_id for response in responses} == {"r1"}
        assert ("octavo-request-id", "r1") in [(key, value) for key, value in await each.initial_metadata()]


async def test_one_id_of_two_tenants_is_two_jobs(door: House, worker: ScriptedWorker) -> None:
    calls = [await begun(client, worker, prompt=(5, 6, index)) for index, client in enumerate((door.acme, door.other))]
    assert [claim.job.request_id for _, claim in calls] == ["acme/r1", "other/r1"]
    taken = (Code.ALREADY_EXISTS, str(RequestIdTaken("r1")))
    assert await failure(door.acme.generate(request("r1", prompt=(9,)))) == taken
    assert (await door.other.cancel(inference_pb2.CancelRequest(request_id="r1"))).cancelled
    assert (await collect(calls[1][0]))[-1].chunks[-1].finish == inference_pb2.CANCELLED
    await worker.commit(chunk(calls[0][1], 1, [11], finish=inference_pb2.STOP))
    assert tokens(await collect(calls[0][0])) == [10, 11]


async def test_a_key_is_revoked_while_a_gateway_runs(doors: House, worker: ScriptedWorker) -> None:
    """And one that is made works; what runs goes on to its end."""
    call, claim = await begun(doors.acme, worker)
    new = Client(doors.ready.grpc, Access(api_key="new key"))
    assert await failure(new.get_model(inference_pb2.GetModelRequest())) == UNKNOWN_KEY
    await doors.store.put({digest_of("key of acme"): None, **entry_of(ApiKey(digest_of("new key"), "acme"))})

    async def revoked() -> bool:
        try:
            await doors.acme.get_model(inference_pb2.GetModelRequest())
        except grpc.aio.AioRpcError as error:
            return (error.code(), error.details()) == UNKNOWN_KEY
        return False

    await until(revoked, within_s=5)
    assert (await new.get_model(inference_pb2.GetModelRequest())).name == "tiny"
    assert await failure(doors.acme.attach(inference_pb2.AttachRequest(request_id="r1"))) == UNKNOWN_KEY
    await worker.commit(chunk(claim, 1, [11], finish=inference_pb2.STOP))
    assert tokens(await collect(call)) == [10, 11]
    onlooker = new.attach(inference_pb2.AttachRequest(request_id="r1", watch=True))
    assert tokens(await collect(onlooker)) == [10, 11]
    await new.channel.close()


async def test_limits_hold_at_all_gateways_together(broker: Broker, worker: ScriptedWorker, tmp_path: Path) -> None:
    store = KeyFile(tmp_path / "keys")
    await store.put(limits_of("acme", Quota(concurrency=1)))
    async with (
        house(broker, store, str(tmp_path / "keys")) as here,
        running_gateway(broker, keys=str(tmp_path / "keys")) as (_, ready, _),
    ):
        there = Client(ready.grpc, Access(api_key="key of acme"))
        call, claim = await begun(there, worker)
        for client in (here.acme, there):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await collect(client.generate(request("r2")))
            assert (caught.value.code(), caught.value.details()) == (
                Code.RESOURCE_EXHAUSTED,
                "with this request it would be 2 unfinished requests, and 1 are allowed",
            )
            assert product.retry_after(caught.value) == 1.0
        # To ask for the same again is no second request; other tenants have limits of their own.
        again = here.acme.attach(inference_pb2.AttachRequest(request_id="r1", watch=True))
        await again.initial_metadata()
        assert await answered(here.other, worker) == 3
        await worker.commit(chunk(claim, 1, [11], finish=inference_pb2.STOP))
        assert tokens(await collect(call)) == tokens(await collect(again)) == [10, 11]
        assert await answered(here.acme, worker) == 3
        await there.channel.close()


async def answered(client: Client, worker: ScriptedWorker) -> int:
    """Asks for `r2`; how many tokens it got."""
    call = client.generate(request("r2"))
    (claim,) = await worker.claim()
    await worker.answer(claim)
    return len(tokens(await collect(call)))


async def test_a_gateway_that_dies_takes_no_place_along(broker: Broker, worker: ScriptedWorker, tmp_path: Path) -> None:
    store = KeyFile(tmp_path / "keys")
    await store.put({**entry_of(ApiKey(digest_of("k1"), "acme")), **limits_of("acme", Quota(concurrency=1))})
    settings: dict[str, Any] = {"keys": str(tmp_path / "keys")}
    async with running_gateway(broker, dies=True, **settings) as (_, ready, _):
        client = Client(ready.grpc, Access(api_key="k1"))
        call, claim = await begun(client, worker)
    assert (await failure(call))[0] is Code.UNAVAILABLE
    async with running_gateway(broker, **settings) as (_, ready, _):
        client = Client(ready.grpc, Access(api_key="k1"))
        assert (await failure(client.generate(request("r2"))))[0] is Code.RESOURCE_EXHAUSTED
        await worker.commit(chunk(claim, 1, [11], finish=inference_pb2.STOP))
        assert await answered(client, worker) == 3
        await client.channel.close()


async def test_without_its_keys_a_gateway_does_not_start(broker: Broker, tmp_path: Path) -> None:
    with pytest.raises(NoKeyFile, match="there is no file of API keys"):
        async with running_gateway(broker, keys=str(tmp_path / "none")):
            pass


async def test_the_products_client_carries_the_key(door: House, worker: ScriptedWorker) -> None:
    worker.serve()
    async with product.Client([door.ready.grpc], access=Access(api_key="key of acme")) as client:
        responses = [each async for each in client.generate(request("r1"), timeout=20)]
        assert tokens(responses) == [2, 3, 4]
        assert {each.request_id for each in responses} == {"r1"}
        assert tokens([each async for each in client.attach("r1")]) == [2, 3, 4]
        assert not await client.cancel("r1")
    record = await worker.jobs.get("acme/r1")
    assert record is not None
    assert record.state is JobState.ENDED
    async with product.Client([door.ready.grpc], access=Access(api_key="wrong")) as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(anext(client.generate(request("r2"))), 5)
    assert (caught.value.code(), caught.value.details()) == UNKNOWN_KEY
