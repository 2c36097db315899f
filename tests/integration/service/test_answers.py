"""What a caller gets of a real worker through a real gateway: all of it, once, with the right end.

Comments such as A20 name the public fault reports of other servers that a test guards against.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from tokenizers import Tokenizer

from octavo.v1 import inference_pb2
from octavo.v1.inference_pb2 import Chat, ChatMessage, GenerateRequest, Sampling, Stopping, TokenIds
from ops.client import Answer, Client
from tests.support.tiny_model import END

if TYPE_CHECKING:
    from pathlib import Path

    from tests.integration.worker.one_worker import Fleet

CONTEXT = 512
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def text(prompt: str = "a book", *, max_tokens: int = 4, ignore_eos: bool = True, **stopping: Any) -> GenerateRequest:
    stop = Stopping(max_tokens=max_tokens, ignore_eos=ignore_eos, **stopping)
    return GenerateRequest(text=prompt, sampling=Sampling(temperature=0.0), stopping=stop)


def ids(count: int, *, first: int = 2, salt: str = "", **stopping: Any) -> GenerateRequest:
    prompt = [first + index % 200 for index in range(count)]
    return GenerateRequest(
        token_ids=TokenIds(ids=prompt),
        sampling=Sampling(temperature=0.0),
        stopping=Stopping(**stopping),
        cache_salt=salt,
    )


async def refused(client: Client, request: GenerateRequest) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.generate(request, timeout=20)
    assert caught.value.code() is INVALID
    return caught.value.details() or ""


async def test_the_joined_stream_is_the_whole_answer(client: Client, model_dir: Path) -> None:
    """A20: fifty short ones, sixteen at a time. The second call finds the job ended and is told all of it at once."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    turns = asyncio.Semaphore(16)

    async def ask(index: int) -> None:
        request = text("a book " * (1 + index % 7) + str(index), max_tokens=1 + index % 5)
        request.request_id = f"r{index}"
        async with turns:
            streamed = await client.generate(request, timeout=20)
        whole = await client.generate(request, timeout=20)
        assert (streamed.finish, len(streamed.token_ids)) == ("LENGTH", 1 + index % 5)
        assert streamed.text == whole.text == tokenizer.decode(streamed.token_ids)
        assert (streamed.token_ids, streamed.usage) == (whole.token_ids, whole.usage)
        assert streamed.usage is not None
        assert streamed.usage.completion_tokens == len(streamed.token_ids)

    await asyncio.gather(*map(ask, range(50)))


async def test_text_that_was_held_back_comes_with_the_last_chunk(client: Client) -> None:
    """A05, A20: the tail of each answer might have begun a stop string."""
    for max_tokens in range(1, 9):
        plain = await client.generate(text(max_tokens=max_tokens), timeout=20)
        held = await client.generate(text(max_tokens=max_tokens, stop=[plain.text[-2:] + "\x00"]), timeout=20)
        assert (held.text, held.token_ids, held.finish) == (plain.text, plain.token_ids, "LENGTH")


async def test_each_kind_of_end_is_told_once(client: Client) -> None:
    """A18, A19: ``Client`` refuses a second end and a missing one."""
    plain = await client.generate(text(max_tokens=6), timeout=20)
    assert plain.finish == "LENGTH"
    stopped = await client.generate(text(max_tokens=6, stop=[plain.text[1:3]]), timeout=20)
    assert (stopped.finish, stopped.text, stopped.choices[0].stop_match) == ("STOP", plain.text[:1], plain.text[1:3])
    end = text(ignore_eos=False)
    end.sampling.logit_bias[0] = 100.0
    answer = await client.generate(end, timeout=20)
    assert (answer.finish, answer.token_ids, answer.text) == ("STOP", [0], "")
    long = text(max_tokens=480)
    long.request_id = "long"
    cancelled = Answer()
    async for response in client.responses(long, timeout=20):
        if not cancelled.token_ids:
            assert await client.cancel("long")
        cancelled.add(response, 0.0)
    cancelled.end(0.0)
    assert cancelled.finish == "CANCELLED"
    assert 0 < len(cancelled.token_ids) < 480


async def test_the_next_callers_after_an_empty_prompt_are_served(client: Client, fleet: Fleet) -> None:
    """B01, B02: nothing of it stays behind. White space is a prompt like any other."""
    empty = [
        GenerateRequest(text=""),
        GenerateRequest(token_ids=TokenIds()),
        GenerateRequest(chat=Chat()),
        GenerateRequest(),
    ]
    expected = await client.generate(text(), timeout=20)
    for request in empty * 5:
        assert "empty" in (said := await refused(client, request)) or "messages" in said or "input" in said
    blank = await client.generate(text("   "), timeout=20)
    assert (blank.finish, len(blank.token_ids)) == ("LENGTH", 4)
    silent = GenerateRequest(chat=Chat(messages=[ChatMessage(role="user", content="")]))
    silent.stopping.CopyFrom(Stopping(max_tokens=4, ignore_eos=True))
    assert (await client.generate(silent, timeout=20)).finish == "LENGTH"
    for _ in range(10):
        answer = await client.generate(text(), timeout=20)
        assert (answer.text, answer.finish) == (expected.text, "LENGTH")
    await fleet.idle()


async def test_one_token_too_many_twenty_times_harms_nobody(client: Client, fleet: Fleet) -> None:
    """B07, B08: refused with both numbers; what just fits is served to its last token, before and after."""
    fits = ids(CONTEXT - 12, max_tokens=12, ignore_eos=True)
    first = await client.generate(fits, timeout=20)
    for _ in range(20):
        said = await refused(client, ids(CONTEXT - 12, max_tokens=13))
        assert "13 after a prompt of 500 tokens" in said
        assert "must be at most 12, as the context of 512 holds" in said
        for length in (CONTEXT, CONTEXT + 1, 4 * CONTEXT):
            assert f"prompt is {length} tokens" in (said := await refused(client, ids(length)))
            assert str(CONTEXT) in said
    second = await client.generate(fits, timeout=20)
    assert (second.token_ids, len(second.token_ids), second.finish) == (first.token_ids, 12, "LENGTH")
    only = await client.generate(ids(CONTEXT - 1, ignore_eos=True), timeout=20)
    assert (len(only.token_ids), only.finish) == (1, "LENGTH")
    await fleet.idle()


async def test_salts_keep_the_prompts_of_tenants_apart(client: Client) -> None:
    """F11: nothing is found under another salt, none included; all but the last token under the same one. An empty salt
    is none."""
    found = []
    answers = set()
    for salt in ("A", "B", "", "A", "B", "", "A "):
        answer = await client.generate(ids(64, salt=salt, max_tokens=4, ignore_eos=True), timeout=20)
        assert answer.usage is not None
        assert answer.route is not None
        assert answer.route.cached_tokens == answer.usage.cached_tokens
        found.append(answer.usage.cached_tokens)
        answers.add(tuple(answer.token_ids))
    assert found == [0, 0, 0, 63, 63, 63, 0]
    assert len(answers) == 1


@pytest.mark.parametrize(("shared", "found"), [(15, 0), (16, 16), (31, 16), (40, 32)])
async def test_what_is_shared_is_told_in_whole_blocks(client: Client, shared: int, found: int) -> None:
    """F10: a shared beginning of less than a block is no hit, and usage says so. A block is ``Model.block_size``."""
    assert (await client.model()).block_size == 16
    await client.generate(ids(50, max_tokens=1), timeout=20)
    other = ids(50, max_tokens=1)
    other.token_ids.ids[shared] = 300
    answer = await client.generate(other, timeout=20)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.cached_tokens) == (50, found)


async def test_end_of_a_chat_is_its_control_token(client: Client) -> None:
    """C07: a control token that was added to the vocabulary can be named, and its text is never shown."""
    request = text(ignore_eos=False, include_stop=True)
    request.sampling.logit_bias[0] = 100.0
    request.stopping.stop_token_ids.append(0)
    answer = await client.generate(request, timeout=20)
    assert (answer.token_ids, answer.choices[0].stop_token, END in answer.text) == ([0], 0, False)
    assert inference_pb2.FinishReason.Value(answer.finish) == inference_pb2.STOP
