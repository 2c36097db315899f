"""Keys and tenants by HTTP: the same as by gRPC, in the words of OpenAI's API."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import openai
import pytest

from kvstore.api_keys import ApiKey, digest_of, entry_of, limits_of
from kvstore.key_file import KeyFile
from kvstore.tenants import Quota
from octavo.v1.inference_pb2 import STOP
from tests.integration.gateway.harness import running_gateway
from tests.integration.gateway.http_client import HttpClient, error_of
from tests.integration.gateway.scripted import chunk
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import httpx2

    from kvstore.client import Broker
    from tests.integration.gateway.scripted import ScriptedWorker

NEEDED = "an API key is needed: send 'authorization: Bearer KEY', as metadata by gRPC, as a header by HTTP"
UNKNOWN = "the API key is not known: it is wrong, or was revoked"
KEYED = (
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("GET", "/metrics"),
)
ASKED: Any = {"model": "tiny", "prompt": [5, 6], "max_tokens": 3}


@dataclass
class House:
    """A gateway with keys: `acme`, `other`, and `boss`, an operator's."""

    store: KeyFile
    acme: HttpClient
    other: HttpClient
    boss: HttpClient

    def new(self, api_key: str) -> HttpClient:
        return HttpClient(self.acme.gateway, self.acme.ready, api_key=api_key)


@pytest.fixture
async def door(broker: Broker, worker: ScriptedWorker, tmp_path: Path) -> AsyncIterator[House]:
    store = KeyFile(tmp_path / "keys")
    for name in ("acme", "other", "boss"):
        await store.put(entry_of(ApiKey(digest_of(f"key of {name}"), name, operator=name == "boss")))
    await store.put(limits_of("acme", Quota(concurrency=1)))
    async with (
        running_gateway(broker, keys=str(tmp_path / "keys"), http_port=0) as (gateway, ready, _),
        AsyncExitStack() as stack,
    ):
        clients = [HttpClient(gateway, ready, api_key=f"key of {name}") for name in ("acme", "other", "boss")]
        yield House(store, *[await stack.enter_async_context(each) for each in clients])


async def ask(http: HttpClient, method: str, path: str, *authorizations: str, **more: Any) -> httpx2.Response:
    headers = [("authorization", each) for each in authorizations]
    return await http.plain.request(method, path, headers=headers, **more)


async def test_nobody_comes_in_without_a_key(door: House) -> None:
    wrong = ("Bearer key of nobody", UNKNOWN)
    several = "2 authorizations came with the call: send one"
    for method, path in KEYED:
        for sent, told in (((), NEEDED), ((wrong[0],), wrong[1]), (("Bearer key of boss",) * 2, several)):
            # Not even the body is looked at: it is none.
            response = await ask(door.acme, method, path, *sent, content=b"{" if method == "POST" else None)
            expected = {"message": told, "type": "authentication_error", "param": None, "code": "invalid_api_key"}
            assert error_of(response) == (401, expected)
            assert response.headers["www-authenticate"] == "Bearer"
    metrics = (await ask(door.boss, "GET", "/metrics", "Bearer key of boss")).text
    assert f"octavo_unauthenticated_calls_total {3.0 * len(KEYED)}" in metrics.splitlines()
    assert 'octavo_http_responses_total{path="/v1/completions",status="401"} 3.0' in metrics.splitlines()


async def test_what_is_open_to_all(door: House) -> None:
    for path, expected in (("/health", ("ok", "unavailable")), ("/docs", None), ("/openapi.json", None)):
        response = await ask(door.acme, "GET", path)
        if expected is None:
            assert response.status_code == 200
            assert path == "/docs" or response.json()["security"] == [{"key": []}, {}]
        else:  # whether or not the gateway has looked for models by now
            assert response.json()["status"] in expected


async def test_metrics_are_for_operators_and_name_no_tenant(door: House, worker: ScriptedWorker) -> None:
    worker.serve()
    await door.acme.openai.completions.create(**ASKED)
    status, error = error_of(await ask(door.acme, "GET", "/metrics", "Bearer key of acme"))
    assert (status, error["type"], error["code"]) == (403, "permission_error", "permission_denied")
    shown = await ask(door.boss, "GET", "/metrics", "Bearer key of boss")
    assert 'octavo_requests_total{model="tiny",outcome="stop"} 1.0' in shown.text.splitlines()
    assert "acme" not in shown.text


async def test_who_has_a_key_is_served(door: House, worker: ScriptedWorker) -> None:
    worker.serve()
    for client in (door.acme, door.other, door.boss):
        assert [each.id async for each in client.openai.models.list()] == ["tiny"]
        assert (await client.openai.completions.create(**ASKED)).choices[0].text == "<2><3><4>"
        stream = await client.openai.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        assert "".join([each.choices[0].delta.content or "" async for each in stream]) == "<2><3><4>"


async def test_one_id_of_two_tenants_is_two_requests(door: House, worker: ScriptedWorker) -> None:
    named: Any = {"X-Request-Id": "r1"}
    calls, claims = [], []
    for index, client in enumerate((door.acme, door.other)):
        body = {**ASKED, "prompt": [5, 6, index]}
        calls.append(
            asyncio.create_task(client.openai.completions.with_raw_response.create(**body, extra_headers=named))
        )
        claims += await worker.claim()
    assert [each.job.request_id for each in claims] == ["acme/r1", "other/r1"]
    for index, claim in enumerate(claims):
        await worker.commit(chunk(claim, 0, [10 + index], finish=STOP))
    answers = [await each for each in calls]
    assert [each.parse().choices[0].text for each in answers] == ["<10>", "<11>"]
    assert {each.headers["x-request-id"] for each in answers} == {"r1"}
    # A name with a tenant in it is none that a client can give.
    named["X-Request-Id"] = "acme/r1"
    asked = asyncio.create_task(door.other.openai.completions.create(**ASKED, extra_headers=named))
    (claim,) = await worker.claim()
    assert claim.job.request_id.startswith("other/")
    assert claim.job.request_id != "other/r1"
    await worker.answer(claim)
    await asked


async def test_above_its_limit_a_tenant_is_told_when_to_come_back(door: House, worker: ScriptedWorker) -> None:
    first = asyncio.create_task(door.acme.openai.completions.create(**ASKED))
    (claim,) = await worker.claim()
    with pytest.raises(openai.RateLimitError) as caught:
        await door.acme.openai.completions.create(**ASKED)
    assert error_of(caught.value.response) == (  # type: ignore[arg-type]
        429,
        {
            "message": "with this request it would be 2 unfinished requests, and 1 are allowed",
            "type": "rate_limit_error",
            "param": None,
            "code": "rate_limit_exceeded",
        },
    )
    told = caught.value.response.headers
    assert (told["retry-after"], told["retry-after-ms"]) == ("1", "1000")
    # Others have limits of their own.
    other = asyncio.create_task(door.other.openai.completions.create(**ASKED))
    (elsewhere,) = await worker.claim()
    for each in (elsewhere, claim):
        await worker.answer(each)
    await other
    await first
    worker.serve()
    await door.acme.openai.completions.create(**ASKED)


async def test_a_key_is_revoked_while_a_gateway_runs(door: House, worker: ScriptedWorker) -> None:
    """What runs goes on to its end."""
    running = asyncio.create_task(door.other.openai.completions.create(**ASKED))
    (claim,) = await worker.claim()
    await door.store.put({digest_of("key of other"): None})

    async def revoked() -> bool:
        return (await ask(door.other, "GET", "/v1/models", "Bearer key of other")).status_code == 401

    await until(revoked, within_s=5)
    with pytest.raises(openai.AuthenticationError, match="it is wrong, or was revoked"):
        await door.other.openai.completions.create(**ASKED)
    await worker.answer(claim)
    assert (await running).choices[0].text == "<2><3><4>"
