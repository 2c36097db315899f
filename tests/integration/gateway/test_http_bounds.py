"""What HTTP clients can't do: send too much, too slowly, or what is no request."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from gateway import service
from gateway.chats import messages_of
from gateway.config import MAX_BODY_BYTES
from gateway.http import bodies, protocol, translate
from gateway.http.server import PROBES
from octavo.v1.inference_pb2 import STOP
from tests.integration.gateway.harness import Client, collect, request
from tests.integration.gateway.http_client import HttpClient, error_of, raw_request
from tests.integration.gateway.scripted import ScriptedWorker, chunk
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

JSON = {"content-type": "application/json"}


async def post(http: HttpClient, content: Any, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    response = await http.plain.post("/v1/completions", content=content, headers=JSON | (headers or {}))
    return error_of(response)


async def test_a_body_of_20_megabytes_is_refused_and_its_sender_is_told(
    worker: ScriptedWorker, http: HttpClient
) -> None:
    body = b'{"prompt": "' + b"a" * 20_000_000 + b'"}'
    told = f"the body is too large: must have at most {MAX_BODY_BYTES} bytes (8 MiB)"
    for headers in ({}, {"connection": "close"}):
        status, error = await post(http, body, headers)
        assert (status, error["message"]) == (413, told)

    async def in_parts() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 2**20):
            yield body[at : at + 2**20]

    status, error = await post(http, in_parts())  # without a length
    assert (status, error["message"]) == (413, told)


async def test_a_client_that_asks_first_need_not_send(http: HttpClient) -> None:
    reader, writer = await http.connect()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-type: application/json\r\n"
        b"content-length: 20000000\r\n\r\n"
    )
    assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
    writer.close()


@pytest.mark.parametrize(
    ("content", "headers", "status", "told"),
    [
        (b"{", {}, 400, "the body is not valid JSON: Expecting property name"),
        (b"[" * 1_000_000, {}, 400, "the body is nested too deeply"),
        (b"[]", {}, 400, "the body must be a JSON object"),
        (b'{"prompt": [' + b"1," * 3_000_000 + b"1]}", {}, 400, "prompt is 3000001 tokens: must be at most 4095"),
        (b'{"prompt": "' + b"a" * 5_000_000 + b'"}', {}, 400, "request is 5000"),
        (b"{}", {"content-type": "text/plain"}, 415, "content-type is 'text/plain': must be application/json"),
        (b"{}", {"content-encoding": "gzip"}, 415, "content-encoding is set: "),
        (b'{"prompt": "a", "top_p": 2}', {}, 400, "top_p is 2: must be above 0 and at most 1"),
    ],
)
async def test_what_is_no_request_is_told(
    worker: ScriptedWorker, http: HttpClient, content: bytes, headers: dict[str, str], status: int, told: str
) -> None:
    got, error = await post(http, content, headers)
    assert (got, error["message"][: len(told)]) == (status, told)
    assert error["type"] == "invalid_request_error"


async def test_paths_and_methods_that_there_are_not(http: HttpClient) -> None:
    status, error = error_of(await http.plain.get("/v1/nothing"))
    assert (status, error["message"], error["code"]) == (404, "there is no GET '/v1/nothing'", "unknown_url")
    response = await http.plain.get("/v1/completions")
    status, error = error_of(response)
    assert (status, error["message"]) == (405, "GET is not allowed for '/v1/completions'")
    assert response.headers["allow"] == "POST"


async def test_health_metrics_and_documentation(worker: ScriptedWorker, http: HttpClient) -> None:
    worker.serve()
    await http.plain.post("/v1/completions", json={"prompt": "a"})

    async def healthy() -> bool:
        return (await http.plain.get("/health")).status_code == 200

    await until(healthy, within_s=5)
    shown = (await http.plain.get("/metrics")).text
    assert 'octavo_requests_total{model="tiny",outcome="stop"} 1.0' in shown
    assert 'octavo_http_responses_total{path="/v1/completions",status="200"} 1.0' in shown
    schema = (await http.plain.get("/openapi.json")).json()
    body = schema["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/CompletionFields"}
    assert "prompt" in schema["components"]["schemas"]["CompletionFields"]["properties"]
    assert set(_references(schema)) <= {f"#/components/schemas/{name}" for name in schema["components"]["schemas"]}
    assert "swagger" in (await http.plain.get("/docs")).text


def _references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [found for each in value.values() for found in _references(each)]
    return [found for each in value for found in _references(each)] if isinstance(value, list) else []


async def test_a_large_body_is_taken_apart_in_a_thread(
    worker: ScriptedWorker, http: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.serve()
    threads = []
    make = translate.completion

    def seen(body: dict[str, Any]) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return make(body)

    monkeypatch.setattr(translate, "completion", seen)
    for size in (100, bodies.LARGE):
        response = await http.plain.post("/v1/completions", json={"prompt": "a", "user": "u" * size})
        assert response.status_code == 200
    assert threads == [True, False]


async def test_json_in_a_chat_is_read_by_a_thread(
    worker: ScriptedWorker, http: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.serve()
    threads = []

    def seen(chat: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return messages_of(chat)

    monkeypatch.setattr(service, "messages_of", seen)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for message in ({"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}):
        response = await http.plain.post("/v1/chat/completions", json={"messages": [message]})
        assert response.status_code == 200
    assert threads == [True, False]


async def test_who_does_not_end_a_head_or_a_body_is_cut_off(http: HttpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_S", 0.2)
    monkeypatch.setattr(bodies, "READ_S", 0.2)
    whole = raw_request({"prompt": "a"})
    for sent, answer in ((b"", b""), (whole[:40], b""), (whole[:-5], b"HTTP/1.1 408 Request Timeout\r\n")):
        reader, writer = await http.connect()
        writer.write(sent)
        got = await asyncio.wait_for(reader.read(), 5)
        assert got[: len(answer)] == answer
        assert bool(got) == bool(answer)
        writer.close()
    # Behind an answered request too.
    reader, writer = await http.connect()
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    await reader.readuntil(b"}")
    writer.write(whole[:40])
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()


@pytest.mark.parametrize(("bound", "value"), [("MAX_BEHIND", 1000), ("BEHIND_S", 0.2)])
async def test_a_body_behind_an_answer_is_not_read_for_ever(
    http: HttpClient, monkeypatch: pytest.MonkeyPatch, bound: str, value: float
) -> None:
    monkeypatch.setattr(protocol, bound, value)
    reader, writer = await http.connect()
    writer.write(b"POST /v1/nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 404 ")
    await reader.readuntil(b"}}")
    if bound == "MAX_BEHIND":
        writer.write(b"x" * 1001)
    with suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()


async def test_clients_whose_hosts_died_are_found_by_tcps_own_probes(http: HttpClient) -> None:
    _, writer = await http.connect()
    await http.plain.get("/health")
    for connection in http.open_connections:
        accepted = connection.transport.get_extra_info("socket")
        assert [accepted.getsockopt(*option) for *option, _ in PROBES] == [value for *_, value in PROBES]
    writer.close()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /" + b"a" * 100_000, 431),
        (b"GET / HTTP/1.1\r\nx: " + b"a" * 100_000, 431),
        (b"\x16\x03\x01 no HTTP\r\n\r\n", 400),
    ],
)
async def test_a_head_that_is_none_is_answered_all_the_same(http: HttpClient, sent: bytes, status: int) -> None:
    reader, writer = await http.connect()
    writer.write(sent)
    got = await asyncio.wait_for(reader.read(), 5)
    assert got.startswith(f"HTTP/1.1 {status} ".encode())
    assert b'{"error": {"message": ' in got
    writer.close()


async def test_a_connection_serves_one_request_after_the_other(worker: ScriptedWorker, http: HttpClient) -> None:
    """Bodies longer than a head may be, and two requests at once."""
    worker.serve()
    reader, writer = await http.connect()
    large = raw_request({"prompt": "a", "user": "u" * 100_000})
    writer.write(large + large)
    for _ in range(2):
        await _answered(reader)
    writer.close()


async def test_an_offer_of_another_protocol_is_passed_over(worker: ScriptedWorker, http: HttpClient) -> None:
    """As Java's client makes one with each request. What follows its head is HTTP/1.1 all the same."""
    worker.serve()
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    sent = raw_request({"prompt": "a"}).replace(b"host: x\r\n", b"host: x\r\n" + offer)
    reader, writer = await http.connect()
    writer.write(sent + sent)
    for _ in range(2):
        await _answered(reader)
    for at in range(len(sent)):
        writer.write(sent[at : at + 1])
        await writer.drain()
    await _answered(reader)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n" + offer + b"\r\n")
    assert (await asyncio.wait_for(reader.readuntil(b"}"), 5)).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def _answered(reader: asyncio.StreamReader) -> None:
    """Reads one completion."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    assert head.startswith(b"HTTP/1.1 200 ")
    (size,) = [line for line in head.splitlines() if line.startswith(b"content-length: ")]
    assert b"<2><3><4>" in await reader.readexactly(int(size.split()[1]))


async def test_more_connections_than_there_may_be(http: HttpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_CONNECTIONS", 1)
    _, kept = await http.connect()
    reader, writer = await http.connect()
    assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    writer.close()
    kept.close()


async def test_a_slow_reader_gets_everything_costs_little_and_holds_up_nobody(
    worker: ScriptedWorker, http: HttpClient
) -> None:
    host, _, port = http.base_url.removeprefix("http://").removesuffix("/v1").rpartition(":")
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect((host, int(port)))
    slow.sendall(raw_request({"prompt": "a", "stream": True, "max_tokens": 2000}))
    (claim,) = await worker.claim()
    text = "x" * 4096
    steps = [chunk(claim, index, [10], text=text, finish=STOP if index == 1999 else 0) for index in range(2000)]
    for at in range(0, 2000, 20):
        await worker.commit(*steps[at : at + 20])
    other = Client(http.ready.grpc)
    quick = other.generate(request())
    (another,) = await worker.claim()
    await worker.answer(another)
    assert len(await asyncio.wait_for(collect(quick), 5)) >= 1
    await other.channel.close()
    (connection,) = [each for each in http.open_connections if each.flow.write_paused]
    assert connection.transport.get_write_buffer_size() < 1_000_000
    slow.setblocking(False)
    got = bytearray()
    while not got.endswith(b"\r\n0\r\n\r\n"):
        part = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(slow, 2**20), 5)
        assert part
        got += part
    slow.close()
    assert got.count(text.encode()) == 2000
    assert b"data: [DONE]\n\n" in got[-100:]
