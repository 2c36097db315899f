"""Pages outlive a fleet: a conversation goes on where it was, on the real model or a simulated one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.embedded import EmbeddedBroker
from octavo.v1.inference_pb2 import GenerateRequest, Sampling, Stopping
from ops.client import Client
from tests.e2e.harness import Up

if TYPE_CHECKING:
    from pathlib import Path

    from ops.answer import Answer

pytestmark = pytest.mark.timeout(600)

STORY = "An octavo is a book whose sheets are folded into eight leaves. " * 12
SIZES = ("--kv-tokens", "2048", "--threads", "1")


async def ask(up: Up, text: str, salt: str = "") -> Answer:
    stopping = Stopping(max_tokens=24, ignore_eos=True)
    request = GenerateRequest(text=text, sampling=Sampling(temperature=0.0), stopping=stopping, cache_salt=salt)
    async with Client(up.target) as client:
        return await client.generate(request, timeout=120)


# Four starts of the real model would take a minute: that its pages keep their bits in a folder is shown with workers.
@pytest.mark.parametrize(("place", "model"), [("redis", "smollm2-135m"), ("folder", "simulated:20000,2")])
async def test_the_second_request_of_a_conversation_finds_the_pages_of_the_first(
    place: str, model: str, tmp_path: Path
) -> None:
    async with EmbeddedBroker() as server:
        pages = ("--pages-redis", server.url) if place == "redis" else ("--pages", f"dir:{tmp_path}")
        options = ("--model", model, *pages)
        up = Up.start(*SIZES, *options).until_ready()
        try:
            first = await ask(up, STORY)
        finally:
            assert up.stop() == 0
        second = STORY + first.text + " And a quarto?"
        up = Up.start(*SIZES, *options).until_ready()
        try:
            warm = await ask(up, second)
            cold = await ask(up, second, salt="never seen")
        finally:
            assert up.stop() == 0
    assert warm.usage is not None
    assert cold.usage is not None
    assert cold.usage.cached_tokens == 0
    assert warm.usage.cached_tokens > 0.8 * warm.usage.prompt_tokens
    assert warm.token_ids == cold.token_ids
