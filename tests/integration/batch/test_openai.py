"""Batches by OpenAI's own client, unchanged, over HTTP: files up, answers down."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import openai
import pytest

from gateway.http import batches as http_batches
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.batch.conftest import World

URL = "/v1/chat/completions"
SLOW = "simulated:1000000,20"


class Client:
    """The synchronous client, each call in a thread."""

    def __init__(self, url: str) -> None:
        self.openai = openai.OpenAI(
            base_url=f"http://{url}/v1",
            api_key="none",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(trust_env=False, timeout=20),
        )

    async def call(self, method: Any, *arguments: Any, **named: Any) -> Any:
        return await asyncio.to_thread(partial(method, *arguments, **named))

    async def upload(self, *lines: bytes, name: str = "mine.jsonl") -> Any:
        return await self.call(self.openai.files.create, file=(name, b"\n".join(lines)), purpose="batch")

    async def create(self, file_id: str, **named: Any) -> Any:
        fields = {"endpoint": URL, "completion_window": "24h", **named}
        return await self.call(self.openai.batches.create, input_file_id=file_id, **fields)

    async def ended(self, batch_id: str, *states: str) -> Any:
        """The batch, once it is in one of these states."""
        wanted = states or ("completed", "failed", "cancelled")

        async def has() -> bool:
            return (await self.call(self.openai.batches.retrieve, batch_id)).status in wanted

        await until(has, within_s=45.0)
        return await self.call(self.openai.batches.retrieve, batch_id)

    async def content(self, file_id: str) -> list[dict[str, Any]]:
        found = await self.call(self.openai.files.content, file_id)
        return [json.loads(each) for each in found.text.splitlines()]


@asynccontextmanager
async def asked(world: World, model: str = "simulated:1000000,2") -> AsyncIterator[Client]:
    """A fleet with HTTP, and a client of it."""
    async with world.fleet(model, http_port=0, batches=str(world.place.folder)):
        client = Client(world.http)
        try:
            yield client
        finally:
            client.openai.close()


@asynccontextmanager
async def served(world: World, model: str = "simulated:1000000,2") -> AsyncIterator[Client]:
    """The same with a worker of batches."""
    async with asked(world, model) as client, world.batch_worker():
        yield client


def line(custom_id: str, max_tokens: int = 3, url: str = URL) -> bytes:
    body = {
        "messages": [{"role": "user", "content": f"Line {custom_id}"}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode()


@pytest.mark.timeout(90)
async def test_a_batch_from_its_file_to_its_answers(world: World) -> None:
    async with served(world) as client:
        file = await client.upload(*(line(f"l{number}") for number in range(20)), line("long", 100_000))
        assert (file.purpose, file.filename, file.object) == ("batch", "mine.jsonl", "file")
        made = await client.create(file.id, metadata={"job": "nightly"})
        assert (made.object, made.input_file_id, made.endpoint) == ("batch", file.id, URL)
        # Whose file is deleted goes on.
        assert (await client.call(client.openai.files.delete, file.id)).deleted
        batch = await client.ended(made.id)
        counts = batch.request_counts
        assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 21, 20, 1)
        assert batch.metadata == {"job": "nightly"}
        assert batch.created_at <= batch.in_progress_at <= batch.completed_at
        answers = await client.content(batch.output_file_id)
        assert sorted(each["custom_id"] for each in answers) == sorted(f"l{number}" for number in range(20))
        answer = openai.types.chat.ChatCompletion.model_validate(answers[0]["response"]["body"])
        assert answer.usage is not None
        assert (answer.usage.completion_tokens, answer.choices[0].message.role) == (3, "assistant")
        (failure,) = await client.content(batch.error_file_id)
        assert (failure["custom_id"], failure["response"]["status_code"]) == ("long", 400)
        assert failure["response"]["body"]["error"]["code"] == "context_length_exceeded"
        told = await client.call(client.openai.files.retrieve, batch.output_file_id)
        raw = await client.call(client.openai.files.content, batch.output_file_id)
        assert (told.purpose, told.bytes) == ("batch_output", len(raw.content))
        listed = await client.call(lambda: [each.id for each in client.openai.files.list(limit=1)])
        assert sorted(listed) == sorted((batch.output_file_id, batch.error_file_id))
        assert [each.id for each in (await client.call(client.openai.batches.list)).data] == [made.id]


@pytest.mark.timeout(90)
async def test_a_file_that_is_no_batch_fails_it_and_says_where(world: World) -> None:
    async with served(world) as client:
        file = await client.upload(line("a"), b"{", line("b", url="/v1/completions"), line("a"))
        batch = await client.ended((await client.create(file.id)).id)
        assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
        assert [each.line for each in batch.errors.data] == [2, 3, 4]
        assert batch.errors.data[2].message == "line 4: id 'a' is that of line 1 too: each must be another"
        with pytest.raises(openai.ConflictError, match="only one that has not ended can be cancelled"):
            await client.call(client.openai.batches.cancel, batch.id)


@pytest.mark.timeout(90)
async def test_a_cancelled_batch_has_the_answers_that_it_got(world: World) -> None:
    async with served(world, SLOW) as client:
        file = await client.upload(*(line(f"l{number}", 2) for number in range(4)), line("slow", 1_000))
        made = await client.create(file.id)
        await world.until(made.id, lambda batch: batch.progress.done == 4)
        assert (await client.call(client.openai.batches.cancel, made.id)).status in ("cancelling", "cancelled")
        batch = await client.ended(made.id, "cancelled")
        assert (batch.request_counts.completed, batch.error_file_id) == (4, None)
        assert len(await client.content(batch.output_file_id)) == 4
        assert batch.cancelled_at >= batch.in_progress_at


@pytest.mark.timeout(120)
async def test_a_kill_of_its_worker_loses_and_doubles_no_line(world: World) -> None:
    ids = sorted(f"l{number}" for number in range(48))
    async with asked(world, SLOW) as client:
        file = await client.upload(*(line(each, 5) for each in ids))
        made = await client.create(file.id)
        async with world.batch_worker("b0") as first:
            await world.until(made.id, lambda batch: batch.progress.done >= 8)
            first.signal(signal.SIGKILL)
            await first.wait()
        assert (await client.call(client.openai.batches.retrieve, made.id)).status == "in_progress"
        async with world.batch_worker("b1"):
            batch = await client.ended(made.id)
        answers = await client.content(batch.output_file_id)
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 48, 48, 0)
    assert sorted(each["custom_id"] for each in answers) == ids
    # What ran when it was killed was found again, not asked for twice.
    assert (await world.ledger())["accepted"] == 48


async def test_what_is_refused_and_why(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_batches, "MAX_BYTES", 2**20)
    async with world.fleet(http_port=0, batches=str(world.place.folder)):
        client = Client(world.http)
        files, batches = client.openai.files, client.openai.batches
        for size in (2**20 + 1, 2**20 + 2**17):  # in a form that may be so large, and in one that may not
            with pytest.raises(openai.APIStatusError) as refused:
                await client.upload(b"x" * size)
            assert refused.value.status_code == 413
            assert "must have at most 1048576 bytes (1 MiB)" in refused.value.message or size > 2**20 + 2**16
        assert (await client.upload(b"x" * 2**20)).bytes == 2**20
        with pytest.raises(openai.BadRequestError, match="purpose is 'vision': must be 'batch'"):
            await client.call(files.create, file=b"x", purpose="vision")
        monkeypatch.setattr(http_batches, "MAX_FILES", 1)
        with pytest.raises(openai.RateLimitError, match="there are 1 files, as many as there may be: delete some"):
            await client.upload(b"x")
        monkeypatch.setattr(http_batches, "MAX_FILES", 2)
        monkeypatch.setattr(http_batches, "MAX_STORED", 2**20)
        with pytest.raises(openai.RateLimitError, match="there are 1048576 bytes in files, as many as there may be"):
            await client.upload(b"x")
        monkeypatch.setattr(http_batches, "MAX_OPEN", 0)
        with pytest.raises(openai.RateLimitError, match="there are 0 batches that have not ended"):
            await client.create("file-" + "0" * 24)
        monkeypatch.setattr(http_batches, "MAX_OPEN", 1)
        gone = "file-" + "0" * 24
        for call in (files.retrieve, files.content, files.delete, batches.retrieve, batches.cancel, client.create):
            named = call if call == client.create else partial(client.call, call)
            with pytest.raises(openai.NotFoundError):
                await named(gone)
        for named_ in ({"endpoint": "/v1/embeddings"}, {"completion_window": "1h"}):
            with pytest.raises(openai.BadRequestError) as wrong:
                await client.create(gone, **named_)
            assert wrong.value.param in named_
        assert len(list((world.place.folder / "files").iterdir())) == 1
        client.openai.close()


async def test_without_a_folder_there_are_neither(world: World) -> None:
    async with world.fleet(http_port=0):
        client = Client(world.http)
        with pytest.raises(openai.NotFoundError, match="there is no POST '/v1/files'"):
            await client.upload(b"x")
        client.openai.close()
