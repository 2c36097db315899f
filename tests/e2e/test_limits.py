"""Bad input, and input at the limits: each gets a clear status, and the next good call works."""

from __future__ import annotations

import asyncio
import math
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
END = 2
"""The model's own end token."""
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
    # B01, B04, B07, B08
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
    "33 choices": (GenerateRequest(text="a", n=33), INVALID, ["n", "33", "32"]),
    "unknown model": (GenerateRequest(text="a", model="gpt-9"), grpc.StatusCode.NOT_FOUND, ["gpt-9", "smollm2-135m"]),
    "5 MiB message": (GenerateRequest(text="a" * (5 << 20)), INVALID, ["4194304", "5242"]),
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


REFUSED: dict[str, GenerateRequest] = {
    # I06, C09, I07, C03
    "n is 100000": GenerateRequest(text="a", n=100_000),
    "logprobs is 21": GenerateRequest(text="a", logprobs=21),
    "prompt_logprobs is 1000000": GenerateRequest(text="a", prompt_logprobs=1_000_000),
    "priority is 101": GenerateRequest(text="a", priority=101),
    # C05, C16
    "sampling.min_p is 1.5": sampled(min_p=1.5),
    "sampling.repetition_penalty is 1e-09": sampled(repetition_penalty=1e-9),
    "sampling.repetition_penalty is 0": sampled(repetition_penalty=0),
    "sampling.presence_penalty is nan": sampled(presence_penalty=math.nan),
    "sampling.frequency_penalty is inf": sampled(frequency_penalty=math.inf),
    "sampling.temperature is 999999": sampled(temperature=999_999),
    "sampling.top_p is -1": sampled(temperature=999_999, top_p=-1, repetition_penalty=0),
    # C06
    f"sampling.logit_bias is for token {VOCAB}": sampled(logit_bias={VOCAB: 1.0, 1: 1.0}),
    f"sampling.logit_bias is for token {2**31}": sampled(logit_bias={2**31: 1.0}),
    "sampling.logit_bias[5] is nan": sampled(logit_bias={5: math.nan}),
    "sampling.logit_bias[5] is 1e+09": sampled(logit_bias={5: 1e9}),
    "sampling.logit_bias is 5000 entries": sampled(logit_bias=dict.fromkeys(range(5000), 1.0)),
    f"stopping.stop_token_ids[1] is {VOCAB}": ids(3, stopping=Stopping(stop_token_ids=[0, VOCAB])),
    "stopping.stop_token_ids is 65 ids": ids(3, stopping=Stopping(stop_token_ids=[0] * 65)),
    "stopping.min_tokens is 5": ids(3, stopping=Stopping(min_tokens=5, max_tokens=4)),
    f"stopping.min_tokens is {CONTEXT}": ids(3, stopping=Stopping(min_tokens=CONTEXT)),
}


async def test_each_bound_is_named_and_the_next_call_works(narrow: Up) -> None:
    async with Client(narrow.target) as client:
        for reason, request in REFUSED.items():
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.generate(request, timeout=30)
            assert refused.value.code() is INVALID, reason
            assert (refused.value.details() or "").startswith(f"{reason}: "), refused.value.details()
        good = await client.generate(chat_request([("user", "Hello")], max_tokens=2), timeout=60)
        assert good.finish in ("LENGTH", "STOP")


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
    "sampling",
    # C01, C02
    [
        {"temperature": 1e-9},
        {"top_k": 1},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"temperature": 100.0, "top_k": 1},
        {"temperature": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0},
    ],
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


async def test_bias_may_name_every_token(narrow: Up) -> None:
    """C06, C07, C10: the last one, control tokens, and nearly all that is likely."""
    async with Client(narrow.target) as client:
        last = await client.generate(sampled(logit_bias={VOCAB - 1: 100.0}, temperature=0), timeout=60)
        assert last.token_ids == [VOCAB - 1] * 4
        end = await client.generate(sampled(logit_bias={END: 100.0}, temperature=0), timeout=60)
        assert (end.token_ids, end.finish, end.choices[0].stop_token) == ([END], "STOP", END)
        request = sampled(logit_bias=dict.fromkeys(range(4096), -100.0), temperature=0.01)
        request.logprobs = 0
        most = await client.generate(request, timeout=60)
        assert all(token >= 4096 for token in most.token_ids)
        assert all(math.isfinite(each.logprob) for each in most.choices[0].logprobs)


async def test_no_end_before_min_tokens(narrow: Up) -> None:
    request = sampled(logit_bias={END: 100.0}, temperature=0)
    request.stopping.MergeFrom(Stopping(max_tokens=8, min_tokens=3))
    async with Client(narrow.target) as client:
        answer = await client.generate(request, timeout=60)
        assert (len(answer.token_ids), answer.token_ids[-1], answer.finish) == (4, END, "STOP")
        assert END not in answer.token_ids[:3]


async def test_a_stop_token_ends_the_answer(narrow: Up) -> None:
    async with Client(narrow.target) as client:
        greedy = await client.generate(sampled(temperature=0), timeout=60)
        request = sampled(temperature=0)
        request.stopping.stop_token_ids.append(greedy.token_ids[2])
        answer = await client.generate(request, timeout=60)
        stop = greedy.token_ids.index(greedy.token_ids[2])
        assert (answer.token_ids, answer.finish) == (greedy.token_ids[: stop + 1], "STOP")
        assert answer.choices[0].stop_token == greedy.token_ids[2]
        assert greedy.text.startswith(answer.text)


@pytest.mark.parametrize("logprobs", [None, 0, 1, 20])
async def test_as_many_logprobs_as_asked_for(narrow: Up, logprobs: int | None) -> None:
    """C09, C15: none asked for is not the same as 0 alternatives."""
    request = ids(5, sampling=Sampling(temperature=0), stopping=Stopping(max_tokens=3, ignore_eos=True))
    if logprobs is not None:
        request.logprobs = request.prompt_logprobs = logprobs
    async with Client(narrow.target) as client:
        answer = await client.generate(request, timeout=60)
    told, prompt = answer.choices[0].logprobs, answer.prompt_logprobs
    if logprobs is None:
        assert (told, prompt) == ([], [])
        return
    assert [each.token_id for each in told] == answer.token_ids
    assert [each.token_id for each in prompt] == list(request.token_ids.ids)[1:]
    assert {len(each.top) for each in (*told, *prompt)} == {logprobs}
    for each in told:  # greedy: the token is the likeliest
        assert [top.token_id for top in each.top][:1] == [each.token_id][:logprobs]


async def test_choices_differ_repeat_and_end_each_by_itself(narrow: Up) -> None:
    """C11. More choices than the worker runs at once."""
    request = ids(20, n=4, sampling=Sampling(seed=1), stopping=Stopping(max_tokens=6))
    async with Client(narrow.target) as client:
        first, second = [await client.generate(request, timeout=120) for _ in range(2)]
        alone = ids(20, sampling=Sampling(seed=1), stopping=Stopping(max_tokens=6))
        (only,) = (await client.generate(alone, timeout=60)).choices
    texts = [each.token_ids for each in first.choices]
    assert len({tuple(each) for each in texts}) == 4
    assert texts == [each.token_ids for each in second.choices]
    assert texts[0] == only.token_ids
    assert all(each.finish in ("STOP", "LENGTH") for each in first.choices)
    assert first.usage is not None
    assert first.usage.completion_tokens == sum(map(len, texts))


async def test_penalties_at_their_bounds_beside_plain_requests(narrow: Up) -> None:
    """C16"""
    async with Client(narrow.target) as client:
        plain = await client.generate(sampled(temperature=0), timeout=60)
        for bound in (0.01, 2.0, 100.0):
            penalized = client.generate(sampled(temperature=0, repetition_penalty=bound), timeout=60)
            beside = client.generate(sampled(temperature=0), timeout=60)
            odd, even = await asyncio.gather(penalized, beside)
            assert len(odd.token_ids) == 4
            assert even.token_ids == plain.token_ids
