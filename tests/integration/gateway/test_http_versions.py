"""HTTP as few clients speak it: version 1.0, and chunks that are none."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from tests.integration.gateway.http_client import HttpClient, raw_request
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.integration.gateway.scripted import ScriptedWorker


async def test_a_client_of_http_1_0_gets_no_chunks(worker: ScriptedWorker, http: HttpClient) -> None:
    worker.serve()
    for stream in (False, True):
        sent = raw_request({"prompt": "a", "stream": stream}).replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n")
        reader, writer = await http.connect()
        writer.write(sent)
        head, _, body = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
        assert head.splitlines()[0] == b"HTTP/1.1 200 OK"
        assert b"connection: close" in head.splitlines()
        assert b"transfer-encoding" not in head
        if stream:
            *events, end = body.decode().removesuffix("\n\n").split("\n\n")
            assert "".join(json.loads(each[6:])["choices"][0]["text"] for each in events) == "<2><3><4>"
            assert end == "data: [DONE]"
        else:
            assert json.loads(body)["choices"][0]["text"] == "<2><3><4>"
            assert f"content-length: {len(body)}".encode() in head.splitlines()
        writer.close()


@pytest.mark.parametrize("whole", [b"", b'6\r\n{"a": \r\n'])
async def test_a_body_in_broken_chunks_is_answered(http: HttpClient, whole: bytes) -> None:
    reader, writer = await http.connect()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(head + b"transfer-encoding: chunked\r\n\r\n" + whole)
    if whole:  # the request is read by then
        await writer.drain()
        await until(lambda: _reads(http), within_s=5)
    writer.write(b"no size\r\n")
    told = await asyncio.wait_for(reader.read(), 5)
    assert told.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert told.endswith(
        b'"Invalid HTTP request received.", "type": "invalid_request_error", "param": null, "code": null}}'
    )
    assert told.count(b"HTTP/1.1 ") == 1
    writer.close()


async def _reads(http: HttpClient) -> bool:
    """Whether a request has come, and nothing of its body waits to be read."""
    return any(each.cycle is not None and not each.cycle.body for each in http.open_connections)
