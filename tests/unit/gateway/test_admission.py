"""Every bound of a request: what is refused, in which words, and what just passes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gateway.admission import Limits, check, check_request_id, resolve
from gateway.errors import AdmissionError
from octavo.v1 import inference_pb2
from octavo.v1.inference_pb2 import Chat, ChatMessage, GenerateRequest, Sampling, Stopping, TokenIds

CONTEXT = 128
VOCAB = 1000
LIMITS = Limits(context_length=CONTEXT, vocab_size=VOCAB)


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(**({} if {"text", "token_ids", "chat"} & set(fields) else {"text": "hello"}) | fields)


def sampling(**fields: Any) -> GenerateRequest:
    return request(sampling=Sampling(**fields))


def stopping(**fields: Any) -> GenerateRequest:
    return request(stopping=Stopping(**fields))


def chat(*messages: tuple[str, str]) -> GenerateRequest:
    return request(chat=Chat(messages=[ChatMessage(role=role, content=content) for role, content in messages]))


REFUSED = [
    (request(request_id="a b"), "request_id is 'a b': must be 1 to 128 characters of [A-Za-z0-9._:-]"),
    (request(request_id="a\n"), "request_id is 'a\\n': must be 1 to 128 characters of [A-Za-z0-9._:-]"),
    (
        request(request_id="x" * 129),
        f"request_id is '{'x' * 64}'... (129 characters): must be 1 to 128 characters of [A-Za-z0-9._:-]",
    ),
    (request(model="m" * 257), f"model is '{'m' * 64}'... (257 characters): must have at most 256 characters"),
    (request(cache_salt="é" * 129), f"cache_salt is '{'é' * 64}'... (129 characters): must have at most 256 bytes"),
    (GenerateRequest(), "input is not set: one of text, token_ids and chat is needed"),
    (request(text=""), "text is empty: must have at least 1 character"),
    (request(token_ids=TokenIds()), "token_ids is empty: must have at least 1 id"),
    (chat(), "chat.messages is 0 messages: must be 1 to 1024"),
    (chat(*[("user", "x")] * 1025), "chat.messages is 1025 messages: must be 1 to 1024"),
    (
        chat(("user", "x"), ("banana", "y")),
        "chat.messages[1].role is 'banana': must be one of system, user, assistant, tool",
    ),
    (chat(("", "x")), "chat.messages[0].role is '': must be one of system, user, assistant, tool"),
    (request(n=2), "n is 2: more than 1 choice is not served by this version"),
    (request(n=100_000), "n is 100000: more than 1 choice is not served by this version"),
    (request(logprobs=0), "logprobs is 0: not served by this version (must be unset)"),
    (request(prompt_logprobs=5), "prompt_logprobs is 5: not served by this version (must be unset)"),
    (request(priority=-1), "priority is -1: not served by this version (must be unset or 0)"),
    (request(detached=True), "detached is true: not served by this version (must be unset)"),
    (sampling(min_p=0.5), "sampling.min_p is 0.5: not served by this version (must be unset or 0)"),
    (sampling(min_p=math.nan), "sampling.min_p is nan: not served by this version (must be unset or 0)"),
    (
        sampling(repetition_penalty=0.0),
        "sampling.repetition_penalty is 0: not served by this version (must be unset or 1)",
    ),
    (
        sampling(presence_penalty=-2.0),
        "sampling.presence_penalty is -2: not served by this version (must be unset or 0)",
    ),
    (
        sampling(frequency_penalty=0.1),
        "sampling.frequency_penalty is 0.1: not served by this version (must be unset or 0)",
    ),
    (
        sampling(logit_bias={7: 1.0, 8: 2.0}),
        "sampling.logit_bias is 2 entries: not served by this version (must be unset)",
    ),
    (stopping(min_tokens=1), "stopping.min_tokens is 1: not served by this version (must be unset or 0)"),
    (
        stopping(stop_token_ids=[1, 2, 3]),
        "stopping.stop_token_ids is 3 ids: not served by this version (must be unset)",
    ),
    (sampling(temperature=math.nan), "sampling.temperature is nan: must be 0 to 100"),
    (sampling(temperature=math.inf), "sampling.temperature is inf: must be 0 to 100"),
    (sampling(temperature=-math.inf), "sampling.temperature is -inf: must be 0 to 100"),
    (sampling(temperature=-1.0), "sampling.temperature is -1: must be 0 to 100"),
    (sampling(temperature=-1e-9), "sampling.temperature is -1e-09: must be 0 to 100"),
    (sampling(temperature=100.01), "sampling.temperature is 100.01: must be 0 to 100"),
    (sampling(top_p=0.0), "sampling.top_p is 0: must be above 0 and at most 1"),
    (sampling(top_p=-1.0), "sampling.top_p is -1: must be above 0 and at most 1"),
    (sampling(top_p=1.001), "sampling.top_p is 1.001: must be above 0 and at most 1"),
    (sampling(top_p=math.nan), "sampling.top_p is nan: must be above 0 and at most 1"),
    (sampling(top_k=-1), "sampling.top_k is -1: must be 0 (off) to the vocabulary's size"),
    (sampling(top_k=-(2**31)), "sampling.top_k is -2147483648: must be 0 (off) to the vocabulary's size"),
    (stopping(max_tokens=0), "stopping.max_tokens is 0: must be at least 1"),
    (stopping(stop=["x"] * 17), "stopping.stop is 17 strings: must be at most 16"),
    (stopping(stop=["x", ""]), "stopping.stop[1] is '': must have 1 to 256 bytes"),
    (stopping(stop=["é" * 129]), f"stopping.stop[0] is '{'é' * 64}'... (129 characters): must have 1 to 256 bytes"),
]


@pytest.mark.parametrize(("bad", "message"), REFUSED, ids=[message[:60] for _, message in REFUSED])
def test_refused_before_any_model_is_known(bad: GenerateRequest, message: str) -> None:
    with pytest.raises(AdmissionError) as caught:
        check(bad)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "good",
    [
        request(),
        request(text="   "),
        request(token_ids=TokenIds(ids=[0])),
        request(request_id="x" * 128),
        request(request_id="A.b_c:d-9"),
        request(model="m" * 256),
        request(cache_salt="é" * 128),
        request(n=1),
        request(n=0),
        chat(("system", "be brief"), ("user", ""), ("assistant", "x"), ("tool", "y")),
        chat(*[("user", "x")] * 1024),
        sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0),
        sampling(temperature=-0.0),
        sampling(temperature=1e-9),
        sampling(temperature=100.0, top_p=1e-9, top_k=2**31 - 1, seed=2**64 - 1),
        sampling(min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0),
        stopping(max_tokens=1, min_tokens=0, stop=["x"] * 16, ignore_eos=True, include_stop=True),
        stopping(max_tokens=2**32 - 1),
        stopping(stop=["é" * 128]),
    ],
)
def test_passes_at_the_bound(good: GenerateRequest) -> None:
    check(good)


@pytest.mark.parametrize("bad", ["", "a/b", "ü", "a b", "x" * 129, "{octavo:default}"])
def test_request_ids_that_may_not_name_a_job(bad: str) -> None:
    with pytest.raises(AdmissionError, match=r"^request_id is "):
        check_request_id(bad)


def resolved(asked: GenerateRequest, prompt: list[int], limits: Limits = LIMITS) -> Any:
    return resolve(asked, request_id="r", model="m", prompt=prompt, limits=limits, seed=42)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        (0, 1, "prompt is 0 tokens: must have at least 1"),
        (128, None, "prompt is 128 tokens: must leave room for at least 1 token in the context of 128"),
        (129, None, "prompt is 129 tokens: must leave room for at least 1 token in the context of 128"),
        (
            128,
            1,
            "stopping.max_tokens is 1 after a prompt of 128 tokens: together they must be at most the context of 128",
        ),
        (
            100,
            29,
            "stopping.max_tokens is 29 after a prompt of 100 tokens: together they must be at most the context of 128",
        ),
        (
            1,
            2**32 - 1,
            "stopping.max_tokens is 4294967295 after a prompt of 1 tokens: "
            "together they must be at most the context of 128",
        ),
    ],
)
def test_what_the_context_has_no_room_for(prompt: int, max_tokens: int | None, message: str) -> None:
    with pytest.raises(AdmissionError) as caught:
        resolved(stopping(max_tokens=max_tokens), [1] * prompt)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "given"), [(1, None, 127), (127, None, 1), (127, 1, 1), (100, 28, 28), (1, 127, 127)]
)
def test_max_tokens_that_fit_the_context(prompt: int, max_tokens: int | None, given: int) -> None:
    assert resolved(stopping(max_tokens=max_tokens), [1] * prompt).stopping.max_tokens == given


def test_a_token_id_out_of_the_vocabulary_is_named() -> None:
    with pytest.raises(AdmissionError) as caught:
        resolved(request(), [0, 999, 1000, 5000])
    assert str(caught.value) == "token_ids.ids[2] is 1000: must be below the vocabulary's size, 1000"


def test_top_k_is_bounded_by_the_vocabulary() -> None:
    assert resolved(sampling(top_k=1000), [1]).sampling.top_k == 1000
    with pytest.raises(AdmissionError) as caught:
        resolved(sampling(top_k=1001), [1])
    assert str(caught.value) == "sampling.top_k is 1001: must be 0 (off) to the vocabulary's size, 1000"


def test_a_job_has_every_optional_field() -> None:
    job = resolved(request(), [1, 2, 3])
    fields = inference_pb2.Sampling.DESCRIPTOR.fields_by_name
    unset = [name for name in fields if name != "logit_bias" and not job.sampling.HasField(name)]
    assert unset == []
    assert (job.sampling.temperature, job.sampling.top_p, job.sampling.top_k, job.sampling.seed) == (1.0, 1.0, 0, 42)
    assert (job.request_id, job.model, list(job.prompt_token_ids), job.n) == ("r", "m", [1, 2, 3], 1)
    assert job.stopping.max_tokens == 125


def test_a_job_keeps_what_was_asked() -> None:
    asked = request(
        sampling=Sampling(temperature=0.0, top_p=0.5, top_k=7, seed=0),
        stopping=Stopping(max_tokens=5, stop=["a", "b"], ignore_eos=True, include_stop=True),
        cache_salt="salt",
    )
    job = resolved(asked, [1])
    assert (job.sampling.temperature, job.sampling.top_p, job.sampling.top_k, job.sampling.seed) == (0.0, 0.5, 7, 0)
    assert job.stopping == asked.stopping
    assert job.cache_salt == "salt"
