"""HTTP requests that end otherwise: clients that leave, failures before and in an answer, a gateway that stops."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import openai
import pytest

from gateway.config import GatewayConfig
from gateway.errors import STARTING
from gateway.server import Gateway
from octavo.v1.inference_pb2 import ERROR, STOP, CancelRequest
from octavo.v1.job_pb2 import FAILURE_UNAVAILABLE
from tests.integration.gateway.harness import running_gateway
from tests.integration.gateway.http_client import HttpClient, error_of, raw_request
from tests.integration.gateway.scripted import ScriptedWorker, chunk
from tests.integration.gateway.test_http import spawn

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvstore.client import Broker

Stop = Callable[[], asyncio.Task[None]]
NAMED = {"x-request-id": "r1"}


def completion(http: HttpClient, prompt: Any = "a", **fields: Any) -> asyncio.Task[Any]:
    return spawn(http.openai.completions.create(model="tiny", prompt=prompt, **fields))


async def test_no_text_ends_a_line_of_a_stream(worker: ScriptedWorker, http: HttpClient) -> None:
    """Whatever libraries take for a line's end."""
    text = "a\u0085b\u2028c\u2029d\x0be\x1cf\r\n"
    asked = spawn(http.plain.post("/v1/completions", json={"prompt": "a", "stream": True}))
    (claim,) = await worker.claim()
    await worker.commit(chunk(claim, 0, [10], text=text, finish=STOP))
    first, last = [line.removeprefix("data: ") for line in (await asked).text.splitlines() if line]
    assert (json.loads(first)["choices"][0]["text"], last) == (text, "[DONE]")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_job(worker: ScriptedWorker, http: HttpClient, stream: bool) -> None:
    asked = completion(http, stream=stream, extra_headers=NAMED)
    (claim,) = await worker.claim()
    await worker.commit(chunk(claim, 0, [10]))
    if stream:
        events = await asked
        assert (await anext(events)).choices[0].text == "<10>"
        await events.close()
    else:
        asked.cancel()
    assert await worker.told_to_drop() == "r1"


async def test_a_client_that_leaves_ends_its_job_of_each_prompt(worker: ScriptedWorker, http: HttpClient) -> None:
    asked = completion(http, ["a", "b", "c"], extra_headers=NAMED)
    await worker.claim(3)
    asked.cancel()
    assert {await worker.told_to_drop() for _ in range(3)} == {"r1.0", "r1.1", "r1.2"}


async def test_of_several_prompts_the_first_that_fails_ends_the_others(
    worker: ScriptedWorker, http: HttpClient
) -> None:
    asked = completion(http, ["a", "b"], extra_headers=NAMED)
    claims = await worker.claim(2)
    (bad,) = [claim for claim in claims if claim.job.request_id == "r1.1"]
    await worker.commit(chunk(bad, 0, [], finish=ERROR, failure=FAILURE_UNAVAILABLE, error="no luck"))
    with pytest.raises(openai.InternalServerError) as caught:
        await asked
    assert (caught.value.status_code, caught.value.message[-7:]) == (503, "no luck")
    assert await worker.told_to_drop() == "r1.0"


async def test_a_failure_before_any_output_has_a_status(worker: ScriptedWorker, http: HttpClient) -> None:
    """Streams too: their head waits for the first output."""
    for stream in (False, True):
        asked = completion(http, stream=stream)
        (claim,) = await worker.claim()
        await worker.commit(chunk(claim, 0, [], finish=ERROR, failure=FAILURE_UNAVAILABLE, error="the worker died"))
        with pytest.raises(openai.InternalServerError) as caught:
            await asked
        assert (caught.value.status_code, caught.value.code) == (503, "unavailable")
        assert caught.value.response.headers["retry-after"] == "1"


async def test_a_failure_in_a_stream_is_its_last_event(worker: ScriptedWorker, http: HttpClient) -> None:
    reader, writer = await http.connect()
    writer.write(raw_request({"prompt": "a", "stream": True}))
    (claim,) = await worker.claim()
    await worker.commit(chunk(claim, 0, [10]))
    await worker.commit(chunk(claim, 1, [], finish=ERROR, failure=FAILURE_UNAVAILABLE, error="the worker died"))
    text = (await reader.readuntil(b"\r\n0\r\n\r\n")).decode()
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    assert [each["choices"][0]["text"] for each in events[:-1]] == ["<10>"]
    assert events[-1] == {
        "error": {"message": "the worker died", "type": "server_error", "param": None, "code": "unavailable"}
    }
    assert "[DONE]" not in text
    writer.close()


async def test_openais_client_reads_a_failure_in_a_stream(worker: ScriptedWorker, http: HttpClient) -> None:
    asked = completion(http, stream=True)
    (claim,) = await worker.claim()
    await worker.commit(chunk(claim, 0, [10]))
    events = await asked
    assert (await anext(events)).choices[0].text == "<10>"
    await worker.commit(chunk(claim, 1, [], finish=ERROR, failure=FAILURE_UNAVAILABLE, error="the worker died"))
    with pytest.raises(openai.APIError, match="the worker died"):
        await anext(events)


async def test_a_job_that_somebody_cancels(worker: ScriptedWorker, broker: Broker) -> None:
    async with running_gateway(broker, http_port=0) as (gateway, ready, client), HttpClient(gateway, ready) as http:
        asked = completion(http, extra_headers=NAMED)
        await worker.claim()
        assert (await client.cancel(CancelRequest(request_id="r1"))).cancelled
        with pytest.raises(openai.APIStatusError) as caught:
            await asked
        assert (caught.value.status_code, caught.value.code) == (499, "cancelled")


async def test_the_same_id_and_payload_is_the_same_job(worker: ScriptedWorker, http: HttpClient) -> None:
    first = completion(http, extra_headers=NAMED)
    (claim,) = await worker.claim()
    again = completion(http, extra_headers=NAMED)
    other = completion(http, "b", extra_headers=NAMED)
    with pytest.raises(openai.ConflictError) as caught:
        await other
    assert caught.value.code == "already_exists"
    await worker.answer(claim)
    assert [(await each).choices[0].text for each in (first, again)] == ["<2><3><4>"] * 2
    assert (await first).id == "cmpl-r1"


async def test_a_name_that_no_job_can_have_is_passed_over_and_a_long_one_refused(
    worker: ScriptedWorker, http: HttpClient
) -> None:
    worker.serve()
    asked = {"json": {"prompt": "a"}}
    named = await http.plain.post("/v1/completions", **asked, headers={"x-request-id": "Root=1; Self=2"})
    assert (named.status_code, named.json()["id"]) == (200, f"cmpl-{named.headers['x-request-id']}")
    status, error = error_of(await http.plain.post("/v1/completions", **asked, headers={"x-request-id": "r" * 129}))
    assert (status, error["message"]) == (400, "X-Request-Id has 129 characters: must have at most 128")


async def test_no_worker_no_such_model_no_room(broker: Broker) -> None:
    async with (
        running_gateway(broker, http_port=0, max_queue=1) as (gateway, ready, _),
        HttpClient(gateway, ready) as http,
    ):
        with pytest.raises(openai.InternalServerError) as none:
            await http.openai.completions.create(model="tiny", prompt="a")
        assert (none.value.status_code, none.value.body["message"]) == (  # type: ignore[index]
            503,
            f"no live worker serves model 'tiny'; {STARTING}",
        )
        assert (await http.plain.get("/health")).status_code == 503
        worker = ScriptedWorker(broker)
        await worker.start()
        with pytest.raises(openai.NotFoundError) as other:
            await http.openai.completions.create(model="large", prompt="a")
        assert other.value.code == "model_not_found"
        first = completion(http)
        (claim,) = await worker.claim()
        with pytest.raises(openai.RateLimitError) as full:
            await http.openai.completions.create(model="tiny", prompt="b")
        assert (full.value.code, full.value.response.headers["retry-after"]) == ("rate_limit_exceeded", "1")
        assert full.value.response.headers["retry-after-ms"] == "100"
        await worker.answer(claim)
        await first
        await worker.stop()


@asynccontextmanager
async def to_be_stopped(broker: Broker, grace_s: float) -> AsyncIterator[tuple[HttpClient, Stop]]:
    """A gateway that the test stops."""
    config = broker.config
    gateway = Gateway(GatewayConfig(config.url, config.namespace, grpc_port=0, http_port=0, grace_s=grace_s))
    ready = await gateway.start()
    stopping: list[asyncio.Task[None]] = []

    def stop() -> asyncio.Task[None]:
        stopping.append(asyncio.create_task(gateway.stop(asyncio.Event())))
        return stopping[0]

    try:
        async with HttpClient(gateway, ready) as http:
            await http.openai.models.retrieve("tiny")
            yield http, stop
    finally:
        await asyncio.wait_for(stopping[0] if stopping else stop(), 15)


async def test_a_gateway_that_stops_lets_answers_end(worker: ScriptedWorker, broker: Broker) -> None:
    async with to_be_stopped(broker, 10) as (http, stop):
        asked = completion(http, stream=True)
        (claim,) = await worker.claim()
        await worker.commit(chunk(claim, 0, [10]))
        events = await asked
        assert (await anext(events)).choices[0].text == "<10>"
        stopping = stop()
        await asyncio.sleep(0)
        status, error = error_of(await http.plain.post("/v1/completions", json={"prompt": "b"}))
        assert (status, error["message"]) == (503, "the gateway is stopping; call another one")
        assert (await http.plain.get("/health")).status_code == 503
        await worker.commit(chunk(claim, 1, [11], finish=STOP))
        assert [each.choices[0].text async for each in events] == ["<11>"]
        await asyncio.wait_for(stopping, 5)
        with pytest.raises(openai.APIConnectionError):
            await http.openai.completions.create(model="tiny", prompt="a")


async def test_a_stream_that_a_stopping_gateway_cuts_off_says_so(worker: ScriptedWorker, broker: Broker) -> None:
    async with to_be_stopped(broker, 0.1) as (http, stop):
        asked = completion(http, stream=True, extra_headers=NAMED)
        (claim,) = await worker.claim()
        await worker.commit(chunk(claim, 0, [10]))
        events = await asked
        await anext(events)
        stop()
        with pytest.raises(openai.APIError, match="the gateway is stopping; the job may go on"):
            await anext(events)
    assert worker.ended_outside.empty()
    async with to_be_stopped(broker, 0.1) as (http, _):
        again = completion(http, extra_headers=NAMED, stream=True)
        await worker.commit(chunk(claim, 1, [11], finish=STOP))
        assert "".join([each.choices[0].text async for each in await again]) == "<10><11>"
