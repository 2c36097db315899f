"""Every bound of a request that needs no model: what is refused, in which words, and what just passes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gateway.admission import check, check_request_id
from gateway.errors import AdmissionError
from octavo.v1.inference_pb2 import Chat, ChatMessage, GenerateRequest, Sampling, Stopping, Structure, TokenIds


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
    # I06
    (request(n=33), "n is 33: must be at most 32"),
    (request(n=100_000), "n is 100000: must be at most 32"),
    # C09, I07
    (request(logprobs=21), "logprobs is 21: must be 0 to 20"),
    (request(logprobs=2**32 - 1), "logprobs is 4294967295: must be 0 to 20"),
    (request(prompt_logprobs=21), "prompt_logprobs is 21: must be 0 to 20"),
    (request(prompt_logprobs=1_000_000), "prompt_logprobs is 1000000: must be 0 to 20"),
    # C03
    (request(priority=101), "priority is 101: must be -100 to 100"),
    (request(priority=-101), "priority is -101: must be -100 to 100"),
    (request(priority=2**31 - 1), "priority is 2147483647: must be -100 to 100"),
    (sampling(min_p=1.001), "sampling.min_p is 1.001: must be 0 to 1"),
    (sampling(min_p=-0.1), "sampling.min_p is -0.1: must be 0 to 1"),
    (sampling(min_p=math.nan), "sampling.min_p is nan: must be 0 to 1"),
    # C05, C16
    (sampling(repetition_penalty=0.0), "sampling.repetition_penalty is 0: must be 0.01 to 100"),
    (sampling(repetition_penalty=1e-9), "sampling.repetition_penalty is 1e-09: must be 0.01 to 100"),
    (sampling(repetition_penalty=0.0099), "sampling.repetition_penalty is 0.0099: must be 0.01 to 100"),
    (sampling(repetition_penalty=100.01), "sampling.repetition_penalty is 100.01: must be 0.01 to 100"),
    (sampling(repetition_penalty=-1.0), "sampling.repetition_penalty is -1: must be 0.01 to 100"),
    (sampling(repetition_penalty=math.nan), "sampling.repetition_penalty is nan: must be 0.01 to 100"),
    (sampling(repetition_penalty=math.inf), "sampling.repetition_penalty is inf: must be 0.01 to 100"),
    (sampling(presence_penalty=-2.001), "sampling.presence_penalty is -2.001: must be -2 to 2"),
    (sampling(presence_penalty=math.nan), "sampling.presence_penalty is nan: must be -2 to 2"),
    (sampling(frequency_penalty=2.001), "sampling.frequency_penalty is 2.001: must be -2 to 2"),
    (sampling(frequency_penalty=-math.inf), "sampling.frequency_penalty is -inf: must be -2 to 2"),
    # C06
    (sampling(logit_bias=dict.fromkeys(range(4097), 1.0)), "sampling.logit_bias is 4097 entries: must be at most 4096"),
    (sampling(logit_bias={9: 1e9, 7: math.nan, 8: 1.0}), "sampling.logit_bias[7] is nan: must be -100 to 100"),
    (sampling(logit_bias={7: math.inf}), "sampling.logit_bias[7] is inf: must be -100 to 100"),
    (sampling(logit_bias={7: 1e9}), "sampling.logit_bias[7] is 1e+09: must be -100 to 100"),
    (sampling(logit_bias={7: -1e9}), "sampling.logit_bias[7] is -1e+09: must be -100 to 100"),
    (stopping(stop_token_ids=[1] * 65), "stopping.stop_token_ids is 65 ids: must be at most 64"),
    # C05
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
    # C02, C03
    (sampling(top_k=-1), "sampling.top_k is -1: must be 0 (off) to the vocabulary's size"),
    (sampling(top_k=-(2**31)), "sampling.top_k is -2147483648: must be 0 (off) to the vocabulary's size"),
    # B03, B04
    (stopping(max_tokens=0), "stopping.max_tokens is 0: must be at least 1"),
    (stopping(stop=["x"] * 17), "stopping.stop is 17 strings: must be at most 16"),
    (stopping(stop=["x", ""]), "stopping.stop[1] is '': must have 1 to 256 bytes"),
    (request(structure=Structure()), "structure is empty: one of json_schema, regex and json_object is needed"),
    (
        request(structure=Structure(json_object=False)),
        "structure.json_object is false: must be true; free text has no structure",
    ),
    (request(structure=Structure(regex="")), "structure.regex is 0 bytes: must have 1 to 65536"),
    (
        request(structure=Structure(json_schema="é" * 32769)),
        "structure.json_schema is 65538 bytes: must have 1 to 65536",
    ),
    (
        request(structure=Structure(regex="a"), stopping=Stopping(ignore_eos=True)),
        "stopping.ignore_eos is true: must be false with a structure, whose end is the answer's",
    ),
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
        request(n=32),
        request(logprobs=0, prompt_logprobs=0),
        request(logprobs=20, prompt_logprobs=20),
        request(priority=100),
        request(priority=-100),
        chat(("system", "be brief"), ("user", ""), ("assistant", "x"), ("tool", "y")),
        chat(*[("user", "x")] * 1024),
        sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0),
        sampling(temperature=-0.0),
        sampling(temperature=1e-9),  # C01
        sampling(temperature=100.0, top_p=1e-9, top_k=2**31 - 1, seed=2**64 - 1),
        sampling(seed=2**63),  # C04
        sampling(min_p=0.0, repetition_penalty=0.01, presence_penalty=-2.0, frequency_penalty=-2.0),
        sampling(min_p=1.0, repetition_penalty=100.0, presence_penalty=2.0, frequency_penalty=2.0),
        sampling(logit_bias=dict.fromkeys(range(4096), -100.0) | {7: 100.0}),
        stopping(stop_token_ids=[0] * 64),
        request(structure=Structure(json_object=True)),
        request(structure=Structure(regex="(" * 65536)),  # what it says is no matter here
        request(structure=Structure(json_schema="é" * 32768)),
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
