"""From a request and its prompt's tokens to a job: what the model's limits refuse, and what the job then has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from gateway.admission import Limits, check, check_after, choices, resolve
from gateway.errors import AdmissionError
from octavo.v1 import inference_pb2
from octavo.v1.inference_pb2 import GenerateRequest, Sampling, Stopping

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.jobs import JobRecord

CONTEXT = 128
VOCAB = 1000
LIMITS = Limits(context_length=CONTEXT, vocab_size=VOCAB)


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(text="hello", **fields)


def sampling(**fields: Any) -> GenerateRequest:
    return request(sampling=Sampling(**fields))


def stopping(**fields: Any) -> GenerateRequest:
    return request(stopping=Stopping(**fields))


def resolved(asked: GenerateRequest, prompt: list[int], limits: Limits = LIMITS) -> Any:
    return resolve(asked, request_id="r", model="m", prompt=prompt, limits=limits, seed=42)


BOTH = "as the context of 128 holds prompt and answer"
PROMPT = f"must be at most 127, {BOTH}; shorten it"


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        # B01, B06, B07, B08
        (0, 1, "prompt is 0 tokens: must have at least 1"),
        *((128, asked, f"prompt is 128 tokens: {PROMPT}") for asked in (None, 1, 2**32 - 1)),
        *((129, asked, f"prompt is 129 tokens: {PROMPT}") for asked in (None, 1, 2**32 - 1)),
        (127, 2, f"stopping.max_tokens is 2 after a prompt of 127 tokens: must be at most 1, {BOTH}"),
        (100, 29, f"stopping.max_tokens is 29 after a prompt of 100 tokens: must be at most 28, {BOTH}"),
        (1, 2**32 - 1, f"stopping.max_tokens is 4294967295 after a prompt of 1 tokens: must be at most 127, {BOTH}"),
    ],
)
def test_what_the_context_has_no_room_for(prompt: int, max_tokens: int | None, message: str) -> None:
    """A prompt that is too long by itself is what is blamed, whatever max_tokens is."""
    with pytest.raises(AdmissionError) as caught:
        resolved(stopping(max_tokens=max_tokens), [1] * prompt)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "given"), [(1, None, 127), (127, None, 1), (127, 1, 1), (100, 28, 28), (1, 127, 127)]
)
def test_max_tokens_that_fit_the_context(prompt: int, max_tokens: int | None, given: int) -> None:
    """B06, B07, B08"""
    assert resolved(stopping(max_tokens=max_tokens), [1] * prompt).stopping.max_tokens == given


VOCABULARY = [
    # C08: rows that only pad a model's embedding are not in its vocabulary.
    (request(), [0, 999, 1000, 5000], "token_ids.ids[2] is 1000: must be below the vocabulary's size, 1000"),
    # C06
    (
        sampling(logit_bias={999: 1.0, 1000: 1.0}),
        [1],
        "sampling.logit_bias is for token 1000: must be below the vocabulary's size, 1000",
    ),
    (
        sampling(logit_bias={2**31: 1.0}),
        [1],
        "sampling.logit_bias is for token 2147483648: must be below the vocabulary's size, 1000",
    ),
    (
        stopping(stop_token_ids=[999, 1000]),
        [1],
        "stopping.stop_token_ids[1] is 1000: must be below the vocabulary's size, 1000",
    ),
    # C02, C03
    (sampling(top_k=1001), [1], "sampling.top_k is 1001: must be 0 (off) to the vocabulary's size, 1000"),
    (sampling(top_k=2**31 - 1), [1], "sampling.top_k is 2147483647: must be 0 (off) to the vocabulary's size, 1000"),
]


@pytest.mark.parametrize(("bad", "prompt", "message"), VOCABULARY)
def test_what_the_vocabulary_does_not_have(bad: GenerateRequest, prompt: list[int], message: str) -> None:
    check(bad)
    with pytest.raises(AdmissionError) as caught:
        resolved(bad, prompt)
    assert str(caught.value) == message


def test_the_last_token_of_the_vocabulary_may_be_named_anywhere() -> None:
    """C07: it may well be a control token, or one that was added."""
    asked = request(sampling=Sampling(top_k=1000, logit_bias={999: 1.0}), stopping=Stopping(stop_token_ids=[999]))
    job = resolved(asked, [999])
    assert (dict(job.sampling.logit_bias), list(job.stopping.stop_token_ids)) == ({999: 1.0}, [999])
    assert job.sampling.top_k == 1000


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_more_logprobs_than_a_tiny_vocabulary_has(field: str) -> None:
    tiny = Limits(context_length=CONTEXT, vocab_size=16)
    assert getattr(resolved(request(**{field: 16}), [1], tiny), field) == 16
    with pytest.raises(AdmissionError) as caught:
        resolved(request(**{field: 17}), [1], tiny)
    assert str(caught.value) == f"{field} is 17: must be 0 to the vocabulary's size, 16"


@pytest.mark.parametrize(("top", "most"), [(0, 131072), (1, 65536), (20, 6241)])
def test_a_prompts_logprobs_are_bounded_together(top: int, most: int) -> None:
    """I07"""
    wide = Limits(context_length=200_000, vocab_size=VOCAB)
    assert resolved(request(prompt_logprobs=top), [1] * most, wide).prompt_logprobs == top
    with pytest.raises(AdmissionError) as caught:
        resolved(request(prompt_logprobs=top), [1] * (most + 1), wide)
    assert str(caught.value) == (
        f"prompt_logprobs is {top} for a prompt of {most + 1} tokens: "
        "the prompt's tokens times (1 + prompt_logprobs) must be at most 131072"
    )
    resolved(request(), [1] * (most + 1), wide)


def test_min_tokens_are_at_most_max_tokens() -> None:
    assert resolved(stopping(min_tokens=5, max_tokens=5), [1]).stopping.min_tokens == 5
    assert resolved(stopping(min_tokens=127), [1]).stopping.min_tokens == 127
    room = "127, which the context has room for after the prompt"
    for asked, limit in ((stopping(min_tokens=6, max_tokens=5), "max_tokens, 5"), (stopping(min_tokens=128), room)):
        with pytest.raises(AdmissionError) as caught:
            resolved(asked, [1])
        assert str(caught.value) == f"stopping.min_tokens is {asked.stopping.min_tokens}: must be at most {limit}"


def admitted(asked: GenerateRequest) -> Any:
    check(asked)
    return resolved(asked, [1])


def varint(value: int) -> bytes:
    """As protobuf writes a number of any width; negative ones with 64 bits."""
    value &= 2**64 - 1
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*data, value))


def on_the_wire(path: str, value: int) -> GenerateRequest:
    """A request with one number, which may be wider than its field: some clients' languages let that through."""
    *outer, name = path.split(".")
    kind = GenerateRequest.DESCRIPTOR.fields_by_name[outer[0]].message_type if outer else GenerateRequest.DESCRIPTOR
    data = varint(kind.fields_by_name[name].number << 3) + varint(value)
    if outer:
        field = GenerateRequest.DESCRIPTOR.fields_by_name[outer[0]].number
        data = varint(field << 3 | 2) + varint(len(data)) + data
    return GenerateRequest.FromString(request().SerializeToString() + data)


@pytest.mark.parametrize("value", [-1, -2, -(2**31), 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63])
@pytest.mark.parametrize(
    "path", ["n", "logprobs", "prompt_logprobs", "priority", "sampling.top_k", "stopping.max_tokens"]
)
def test_numbers_at_the_edges_of_their_types(path: str, value: int) -> None:
    """B05, C03: protobuf cuts a number that is too wide. What is left is refused, or is a value that may be had."""
    asked = on_the_wire(path, value)
    seen = asked
    for name in path.split("."):
        seen = getattr(seen, name)
    allowed = {"n": (0,), "logprobs": (0,), "prompt_logprobs": (0,), "priority": (0, -1, -2), "sampling.top_k": (0,)}
    if seen in allowed.get(path, ()):
        admitted(asked)
        return
    with pytest.raises(AdmissionError, match=path):
        admitted(asked)


@pytest.mark.parametrize("value", [0, -1, 2**63 - 1, 2**63, 2**64 - 1])
def test_every_seed_of_64_bits(value: int) -> None:
    """C04"""
    asked = on_the_wire("sampling.seed", value)
    assert admitted(asked).sampling.seed == value % 2**64


def test_a_job_has_every_optional_field() -> None:
    job = resolved(request(), [1, 2, 3])
    fields = inference_pb2.Sampling.DESCRIPTOR.fields_by_name
    unset = [name for name in fields if name != "logit_bias" and not job.sampling.HasField(name)]
    assert unset == []
    sampling = job.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (
        1.0,
        1.0,
        0,
        0.0,
        42,
    )
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    assert (penalties, dict(sampling.logit_bias)) == ((1.0, 0.0, 0.0), {})
    assert (job.request_id, job.model, list(job.prompt_token_ids), job.n) == ("r", "m", [1, 2, 3], 1)
    assert (job.stopping.max_tokens, job.stopping.min_tokens, job.priority) == (125, 0, 0)
    # C15: not asked for, which is not the same as 0.
    assert not job.HasField("logprobs")
    assert not job.HasField("prompt_logprobs")


def test_a_job_keeps_what_was_asked() -> None:
    asked = request(
        sampling=Sampling(
            temperature=0.0,
            top_p=0.5,
            top_k=7,
            min_p=0.25,
            seed=0,
            repetition_penalty=1.5,
            presence_penalty=-0.5,
            frequency_penalty=2.0,
            logit_bias={3: -100.0, 4: 0.5},
        ),
        stopping=Stopping(
            max_tokens=5, min_tokens=2, stop=["a", "b"], stop_token_ids=[8, 9], ignore_eos=True, include_stop=True
        ),
        n=3,
        logprobs=0,
        prompt_logprobs=2,
        priority=-7,
        cache_salt="salt",
    )
    check(asked)
    job = resolved(asked, [1])
    assert (job.sampling, job.stopping) == (asked.sampling, asked.stopping)
    assert (job.n, job.priority, job.cache_salt) == (3, -7, "salt")
    assert (job.HasField("logprobs"), job.logprobs, job.prompt_logprobs) == (True, 0, 2)


@pytest.mark.parametrize(("n", "count"), [(0, 1), (1, 1), (32, 32)])
def test_no_number_of_choices_means_one(n: int, count: int) -> None:
    assert choices(request(n=n)) == resolved(request(n=n), [1]).n == count


def test_a_job_that_nobody_waits_for_says_so() -> None:
    limits = Limits(context_length=100, vocab_size=10)
    for detached in (False, True):
        request = GenerateRequest(text="a", detached=detached)
        check(request)
        job = resolve(request, request_id="r", model="m", prompt=[1], limits=limits, seed=1)
        assert job.detached is detached


def record(next_indexes: Sequence[int], ends: dict[int, int]) -> JobRecord:
    named: Any = SimpleNamespace(next=dict(enumerate(next_indexes)), ends=ends)
    return cast("JobRecord", named)


def test_only_choices_that_a_job_has_can_be_gone_on_with() -> None:
    check_after({}, record([0], {}))
    check_after({0: 2**32 - 1, 2: 0}, record([0] * 3, {}))
    with pytest.raises(AdmissionError, match="after is of choice 3: the job has 3, counted from 0"):
        check_after({0: 1, 3: 0}, record([0] * 3, {}))


@pytest.mark.parametrize("finish", [inference_pb2.STOP, inference_pb2.LENGTH])
def test_nobody_goes_on_behind_the_end_of_a_whole_answer(finish: int) -> None:
    """It would be told that the job gave another answer, which is not true."""
    ended = record([10, 10], {0: finish, 1: inference_pb2.ERROR})
    check_after({0: 10, 1: 11}, ended)
    with pytest.raises(
        AdmissionError, match="after is 11 for choice 0: must be at most 10, where that choice has ended"
    ):
        check_after({0: 11}, ended)


def test_the_form_of_an_answer_is_carried_as_it_is() -> None:
    asked = request(structure=inference_pb2.Structure(regex="a|b"))
    check(asked)
    assert resolved(asked, [1]).structure == inference_pb2.Structure(regex="a|b")
    assert not resolved(request(), [1]).HasField("structure")
