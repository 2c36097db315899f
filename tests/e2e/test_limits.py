"""Bad input, and input at the limits: each gets a clear status, and the next good call works."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from octavo.v1 import inference_pb2
from octavo.v1.inference_pb2 import GenerateRequest, Sampling, Stopping, TokenIds
from ops.client import Client, chat_request

if TYPE_CHECKING:
    from tests.e2e.harness import Up

pytestmark = pytest.mark.timeout(400)

CONTEXT = 1024
"""Of the narrow fleet: its pool, which is smaller than the model's own context."""
VOCAB = 49152
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def ids(count: int, **settings: Any) -> GenerateRequest:
    return GenerateRequest(token_ids=TokenIds(ids=[1000 + index for index in range(count)]), **settings)


def sampled(**settings: Any) -> GenerateRequest:
    return GenerateRequest(text="The sea", sampling=Sampling(**settings), stopping=Stopping(max_tokens=4))


BAD = {
    "empty text": (GenerateRequest(text=""), INVALID, ["empty"]),
    "no ids": (GenerateRequest(token_ids=TokenIds()), INVALID, ["empty"]),
    "no messages": (GenerateRequest(chat=inference_pb2.Chat()), INVALID, ["messages", "0"]),
    "no input": (GenerateRequest(), INVALID, ["input"]),
    "max_tokens 0": (ids(3, stopping=Stopping(max_tokens=0)), INVALID, ["max_tokens", "0"]),
    "prompt of all the context": (ids(CONTEXT), INVALID, [str(CONTEXT)]),
    "prompt beyond the context": (ids(CONTEXT + 1), INVALID, [str(CONTEXT), str(CONTEXT + 1)]),
    "prompt and answer beyond it": (ids(CONTEXT - 3, stopping=Stopping(max_tokens=4)), INVALID, [str(CONTEXT), "4"]),
    "temperature NaN": (sampled(temperature=float("nan")), INVALID, ["temperature", "nan"]),
    "temperature -1": (sampled(temperature=-1), INVALID, ["temperature", "-1"]),
    "top_p 0": (sampled(top_p=0.0), INVALID, ["top_p", "0"]),
    "top_k -1": (sampled(top_k=-1), INVALID, ["top_k", "-1"]),
    "top_k beyond the vocabulary": (sampled(top_k=VOCAB + 1), INVALID, ["top_k", str(VOCAB + 1), str(VOCAB)]),
    "token id beyond the vocabulary": (
        GenerateRequest(token_ids=TokenIds(ids=[VOCAB])),
        INVALID,
        [str(VOCAB)],
    ),
    "empty stop string": (GenerateRequest(text="a", stopping=Stopping(stop=[""])), INVALID, ["stop"]),
    "request id with a space": (GenerateRequest(text="a", request_id="a b"), INVALID, ["request_id"]),
    "two choices": (GenerateRequest(text="a", n=2), INVALID, ["n", "2"]),
    "unknown model": (GenerateRequest(text="a", model="gpt-9"), grpc.StatusCode.NOT_FOUND, ["gpt-9", "smollm2-135m"]),
    "5 MiB message": (GenerateRequest(text="a" * (5 << 20)), grpc.StatusCode.RESOURCE_EXHAUSTED, ["4194304"]),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_input_gets_a_clear_status_and_the_next_call_works(narrow: Up, name: str) -> None:
    request, code, words = BAD[name]
    async with Client(narrow.target) as client:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.generate(request, timeout=30)
        details = refused.value.details() or ""
        assert refused.value.code() is code, details
        assert [word for word in words if word not in details] == [], details
        good = await client.generate(chat_request([("user", "Hello")], max_tokens=2), timeout=60)
        assert good.finish in ("LENGTH", "STOP")
        assert [(queue.undelivered, queue.pending) for queue in await client.queues()] == [(0, 0)]


async def test_the_model_tells_the_limit_that_holds(narrow: Up) -> None:
    async with Client(narrow.target) as client:
        model = await client.model()
        assert (model.name, model.context_length, model.vocab_size) == ("smollm2-135m", CONTEXT, VOCAB)


@pytest.mark.parametrize(
    ("prompt", "asked", "answered"), [(CONTEXT - 1, None, 1), (CONTEXT - 4, 4, 4), (CONTEXT - 5, None, 5)]
)
async def test_the_context_can_be_used_to_its_last_token(
    narrow: Up, prompt: int, asked: int | None, answered: int
) -> None:
    request = ids(prompt, sampling=Sampling(temperature=0.0), stopping=Stopping(max_tokens=asked, ignore_eos=True))
    async with Client(narrow.target) as client:
        answer = await client.generate(request, timeout=120)
        assert (answer.finish, len(answer.token_ids)) == ("LENGTH", answered)


@pytest.mark.parametrize(
    "sampling", [{"temperature": 1e-9}, {"top_k": 1}, {"top_p": 1e-9}, {"temperature": 100.0, "top_k": 1}]
)
async def test_extreme_but_legal_sampling_is_greedy(narrow: Up, sampling: dict[str, float]) -> None:
    async with Client(narrow.target) as client:
        greedy = await client.generate(sampled(temperature=0.0), timeout=60)
        extreme = await client.generate(sampled(**sampling), timeout=60)
        assert extreme.token_ids == greedy.token_ids


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_exactly_as_many_tokens_as_asked_for(narrow: Up, count: int) -> None:
    async with Client(narrow.target) as client:
        answer = await client.generate(ids(5, stopping=Stopping(max_tokens=count, ignore_eos=True)), timeout=60)
        assert answer.usage is not None
        assert (len(answer.token_ids), answer.usage.completion_tokens, answer.finish) == (count, count, "LENGTH")
