"""Several gateways behind one port: each takes connections, and one that is killed is missed by nobody."""

from __future__ import annotations

import os
import re
import signal
from typing import TYPE_CHECKING
from urllib.request import urlopen

import pytest

from gateway.client import Client
from octavo.v1.inference_pb2 import GenerateRequest, Sampling, Stopping
from tests.e2e.harness import Up

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(400)

TRIES = 200
"""Connections, at most, until each of three gateways had one."""


@pytest.fixture
def three() -> Iterator[Up]:
    """Three gateways on one port for gRPC and one for HTTP."""
    up = Up.start("--model", "simulated:4000,5", "--gateways", "3", "--one-port", "--http-port", "0", "--grace", "5")
    try:
        yield up.until_ready()
    finally:
        status = up.stop()
    assert status == 0, "\n".join(up.said)


def page(address: str, path: str) -> str:
    """Over a connection of its own."""
    with urlopen(f"http://{address}{path}", timeout=10) as response:
        return str(response.read(), "utf-8")


def served(metrics: str) -> bool:
    """Whether that gateway has answered a request for its health."""
    return bool(re.search(r'^octavo_http_responses_total\{path="/health",.*\} [1-9]', page(metrics, "/metrics"), re.M))


async def answered(up: Up, request_id: str) -> tuple[list[int], bool]:
    """Tokens, and whether they had an end."""
    request = GenerateRequest(
        request_id=request_id,
        text="A book is",
        sampling=Sampling(temperature=0),
        stopping=Stopping(max_tokens=20, ignore_eos=True),
    )
    tokens: list[int] = []
    ended = False
    async with Client(up.facts["targets"]) as client:
        async for response in client.generate(request, timeout=30):
            for chunk in response.chunks:
                tokens += chunk.token_ids
                ended = ended or bool(chunk.finish)
    return tokens, ended


async def test_each_of_them_serves_and_what_one_leaves_the_others_take(three: Up) -> None:
    gateways = three.facts["gateways"]
    assert len({each["pid"] for each in gateways}) == len({each["incarnation"] for each in gateways}) == 3
    assert [each["grpc"] for each in gateways] == three.facts["targets"] * 3
    (http,) = {each["http"] for each in gateways}

    for _ in range(TRIES):
        page(http, "/health")
        if all(served(each["metrics"]) for each in gateways):
            break
    else:
        pytest.fail("a gateway got no connection")

    before = await answered(three, "before")
    assert before[1]
    assert len(before[0]) == 20
    os.kill(gateways[0]["pid"], signal.SIGKILL)
    for turn in range(5):
        assert await answered(three, f"after-{turn}") == before
    three.until(lambda: any("g0 is back" in line for line in three.said), 30)
    assert await answered(three, "back") == before
