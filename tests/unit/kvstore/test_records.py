"""What is read from a job's hash, and what a job is charged at."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from gateway.config import MAX_REQUEST_BYTES
from gateway.stream import usage_of
from kvstore import commits
from kvstore.block_hash import TOKEN_BYTES
from kvstore.claims import parse_claim
from kvstore.entries import Entry
from kvstore.limits import MAX_CHOICES, MAX_JOB_BYTES, MAX_REST_BYTES, broken
from kvstore.prompts import give
from kvstore.records import (
    MOST_ATTEMPTS,
    MOST_TOKENS,
    RECORD_FIELDS,
    JobState,
    charge,
    parse_job,
    parse_record,
)
from kvstore.token_log import MAX_BYTES, MAX_PUBLISHED
from octavo.v1 import inference_pb2, job_pb2

if TYPE_CHECKING:
    from collections.abc import Callable


def test_a_job_is_charged_its_prompt_once_and_every_answer_at_its_maximum() -> None:
    job = job_pb2.Job(prompt_token_ids=[1, 2, 3], stopping=inference_pb2.Stopping(max_tokens=10))
    for n, tokens in ((0, 13), (1, 13), (2, 23), (32, 323)):
        job.n = n
        assert charge(job) == tokens


def test_a_payload_that_no_gateway_wrote_is_no_job() -> None:
    job = job_pb2.Job(request_id="r", prompt_token_ids=[1], n=MAX_CHOICES)
    assert parse_job(job.SerializeToString(), "r") == job
    nobodys = (
        (job.SerializeToString(), "other", "its payload is another job's, or has no prompt"),
        (job_pb2.Job(request_id="r").SerializeToString(), "r", "its payload is another job's, or has no prompt"),
        (b"\x80\x04pickle", "r", "its payload does not parse"),
        (None, "r", "its payload is another job's, or has no prompt"),
        (70_000_000, "r", "its payload has 70000000 bytes, more than its worker's context has room for"),
    )
    for payload, request_id, reason in nobodys:
        with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
            parse_job(payload, request_id)


def full() -> job_pb2.Job:
    """A job that has as much of everything as a gateway lets through."""
    return job_pb2.Job(
        request_id="r" * 128,
        model="\U0001d11e" * 256,
        prompt_token_ids=[2**32 - 1] * (131072 // 21),
        sampling=inference_pb2.Sampling(
            temperature=100,
            top_p=1,
            top_k=2**31 - 1,
            min_p=1,
            seed=2**64 - 1,
            repetition_penalty=100,
            presence_penalty=2,
            frequency_penalty=2,
            logit_bias={2**32 - 1 - each: 100.0 for each in range(4096)},
        ),
        stopping=inference_pb2.Stopping(
            max_tokens=2**32 - 1,
            min_tokens=2**32 - 1,
            stop=["\u00e9" * 128] * 16,
            stop_token_ids=[2**32 - 1] * 64,
            ignore_eos=True,
            include_stop=True,
        ),
        n=32,
        priority=-100,
        cache_salt="\u00e9" * 128,
        logprobs=20,
        prompt_logprobs=20,
        structure=inference_pb2.Structure(regex="\u00e9" * 32768),
    )


def test_a_job_with_as_much_of_everything_as_may_be_is_read() -> None:
    job = full()
    assert broken(job) == ""
    payload = job.SerializeToString()
    assert parse_job(payload, "r" * 128) == job
    assert len(payload) - len(job.prompt_token_ids) * TOKEN_BYTES <= MAX_REST_BYTES


def test_a_request_of_nothing_but_token_ids_is_a_job_that_any_worker_reads() -> None:
    """Four million ids of one byte each are the most that a request has."""
    job = full()
    job.ClearField("prompt_logprobs")
    del job.prompt_token_ids[:]
    give(job, [1] * MAX_REQUEST_BYTES)
    payload = job.SerializeToString()
    assert 4 * MAX_REQUEST_BYTES < len(payload) <= MAX_JOB_BYTES
    assert len(parse_job(payload, "r" * 128).prompt_token_ids) == MAX_REQUEST_BYTES


def longer(job: job_pb2.Job) -> None:
    job.stopping.stop[7] = "x" * 257


def wider(job: job_pb2.Job) -> None:
    job.structure.json_schema = "x" * 65537


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda job: job.MergeFrom(job_pb2.Job(request_id="r" * 194)), "request_id (characters) is 194, of 193"),
        (lambda job: job.MergeFrom(job_pb2.Job(model="m" * 257)), "model (characters) is 257, of 256"),
        (lambda job: job.MergeFrom(job_pb2.Job(n=33)), "n is 33, of 32"),
        (lambda job: job.MergeFrom(job_pb2.Job(n=2**32 - 1)), "n is 4294967295, of 32"),
        (lambda job: job.MergeFrom(job_pb2.Job(priority=101)), "priority, without its sign, is 101, of 100"),
        (lambda job: job.MergeFrom(job_pb2.Job(priority=-(2**31))), "priority, without its sign, is 2147483648, of"),
        (lambda job: job.MergeFrom(job_pb2.Job(cache_salt="s" * 257)), "cache_salt (bytes) is 257, of 256"),
        (lambda job: job.stopping.stop.append("x"), "stopping.stop (strings) is 17, of 16"),
        (longer, "stopping.stop (bytes of one) is 257, of 256"),
        (lambda job: job.stopping.stop_token_ids.append(1), "stopping.stop_token_ids (ids) is 65, of 64"),
        (lambda job: job.sampling.logit_bias.update({1: 1.0}), "sampling.logit_bias (entries) is 4097, of 4096"),
        (wider, "structure (bytes) is 65537, of 65536"),
        (lambda job: job.MergeFrom(job_pb2.Job(logprobs=21)), "logprobs is 21, of 20"),
        (lambda job: job.MergeFrom(job_pb2.Job(prompt_logprobs=21)), "prompt_logprobs is 21, of 20"),
        (lambda job: job.prompt_token_ids.append(1), "prompt_logprobs (of all tokens) is 131082, of 131072"),
    ],
)
def test_a_job_that_breaks_a_bound_is_none(change: Callable[[job_pb2.Job], None], reason: str) -> None:
    job = full()
    change(job)
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}.* at most$"):
        parse_job(job.SerializeToString(), job.request_id)


HASH = {
    "state": b"running",
    "attempt": b"1",
    "owner": b"i",
    "entry": b"7-0",
    "worker": b"w0",
    "worker_incarnation": b"i",
    "gateway": b"g",
    "prompt_tokens": b"3",
    "cached_tokens": b"1",
    "submitted_ms": b"1000",
    "choices": b"3",
    "next:0": b"7",
    "next:2": b"4",
    "end:2": b"2",
    "next:3": b"9",
    "end:3": b"1",
}


def test_a_record_tells_of_each_choice_of_the_job_and_no_others() -> None:
    fields = dict(HASH)
    record = parse_record("r", [fields.get(name) for name in RECORD_FIELDS], now_ms=2000)
    assert record is not None
    assert (record.state, record.finish, record.remaining_ms) == (JobState.RUNNING, None, None)
    assert (record.owner, record.entry, record.worker) == ("i", "7-0", "w0")
    assert (record.next, record.ends) == ({0: 7, 1: 0, 2: 4}, {2: inference_pb2.LENGTH})
    assert (record.fetched_tokens, record.fingerprint, record.deaths, record.detached) == (0, "", 0, False)
    assert record.digest == b""
    fields |= {"fetched_tokens": b"5", "fingerprint": b"f", "deaths": b"2", "detached": b"1", "digest": b"x\x00y"}
    record = parse_record("r", [fields.get(name) for name in RECORD_FIELDS], now_ms=2000)
    assert record is not None
    assert (record.fetched_tokens, record.fingerprint, record.deaths, record.detached) == (5, "f", 2, True)
    assert (record.digest, record.request_id) == (b"x\x00y", "r")
    assert parse_record("r", [None] * len(RECORD_FIELDS), now_ms=0) is None
    assert len(set(RECORD_FIELDS)) == len(RECORD_FIELDS) == 20 + 2 * MAX_CHOICES


JUNK = {b"junk", b"", b"1.5", b"-5", b"007", b"9" * 30, b"9" * 5000, None}


@pytest.mark.parametrize(
    ("names", "junk"),
    [
        (("attempt", "prompt_tokens", "cached_tokens", "submitted_ms", "choices"), JUNK),
        (("next:0", "predicted", "fetched_tokens", "deaths", "deadline_ms", "end:0"), JUNK - {b"", None}),
        (("end:0",), {b"", b"0", b"256"}),
        (("owner", "entry", "worker", "worker_incarnation", "gateway"), {None, b"\xff"}),
        (("state",), {b"", b"asleep", b"\xff"}),
    ],
)
def test_a_record_that_is_not_as_we_write_it_is_none(names: tuple[str, ...], junk: set[bytes | None]) -> None:
    for name in names:
        for value in junk:
            with pytest.raises(ValueError, match=r"^.{1,100}$"):
                parse_record("r", [{**HASH, name: value}.get(each) for each in RECORD_FIELDS], now_ms=2000)


def test_what_a_job_used_is_told_whatever_its_choices_add_up_to() -> None:
    most = str(MOST_TOKENS).encode()
    fields = {**HASH, "next:0": most, "next:1": most, "prompt_tokens": most, "cached_tokens": most}
    fields["attempt"] = str(MOST_ATTEMPTS).encode()
    record = parse_record("r", [fields.get(name) for name in RECORD_FIELDS], now_ms=2000)
    assert record is not None
    usage = usage_of(record)
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (MOST_TOKENS,) * 3
    assert usage.attempts == MOST_ATTEMPTS


ENTRY = Entry("1-0", "r")


def answer(n: int, still_open: bytes, *positions: bytes | None) -> list[bytes | int | None]:
    """What claim.lua tells of a job with n choices."""
    payload = job_pb2.Job(request_id="r", prompt_token_ids=[1], n=n).SerializeToString()
    return [payload, 2, b"g", b"1000", 1500, b"", str(max(n, 1)).encode(), still_open, b"16", b"32", *positions]


def test_a_claim_tells_where_each_choice_goes_on() -> None:
    claim = parse_claim(ENTRY, answer(3, b"2", b"7", None, None, None, b"0", b"1"), now_ms=2000)
    assert (claim.attempt, claim.queued_ms, claim.remaining_ms, claim.gateway) == (2, 500, None, "g")
    assert (claim.next, claim.ended, claim.cached_tokens) == ((7, 0, 0), frozenset({2}), 16)
    assert claim.predicted == 32
    first = parse_claim(ENTRY, answer(0, b"1"), now_ms=2000)
    assert (first.next, first.ended) == ((0,), frozenset())


@pytest.mark.parametrize(
    ("still_open", "positions"),
    [
        (b"1", (b"-1", None, None, None)),
        (b"2", (b"-1", None, None, None)),
        (b"2", (b"many", None, None, None)),
        *((b"2", (junk, None, None, None)) for junk in (str(2**32).encode(), b"1.5", b"+1", b" 1", b"1_0", b"007")),
        (b"2", (b"1", b"1", None, None)),
        (b"1", (b"1", None, None, None)),
        (b"0", (b"1", b"1", b"1", b"1")),
    ],
)
def test_a_claim_whose_choices_are_not_as_we_write_them_is_none(
    still_open: bytes, positions: tuple[bytes | None, ...]
) -> None:
    with pytest.raises(ValueError, match=r"^(b'.*' is not 0 to|of its 2 choices)"):
        parse_claim(ENTRY, answer(2, still_open, *positions), now_ms=2000)


def test_a_delivery_as_the_script_takes_it() -> None:
    delivery = job_pb2.Delivery(attempt=2, chunk=inference_pb2.Chunk(choice=1, start=3, token_ids=[5, 6]))
    assert commits.described(delivery, "7-0") == "2 1 3 5 7-0"
    assert commits.described(delivery, "") == "2 1 3 5 "
    delivery.route.cached_tokens, delivery.route.fetched_tokens = 48, 16
    assert commits.described(delivery, "7-0") == "2 1 3 5 7-0 0  48 16"
    assert commits.described(delivery, "") == "2 1 3 5  0  48 16"
    delivery.chunk.finish = inference_pb2.STOP
    assert commits.described(delivery, "7-0") == "2 1 3 5 7-0 1 finished 48 16"
    delivery.chunk.finish, delivery.failure = inference_pb2.ERROR, job_pb2.FAILURE_DEADLINE
    assert commits.described(delivery, "7-0") == "2 1 3 5 7-0 4 expired 48 16"


def test_what_is_published_together_stays_below_what_is_read() -> None:
    """In the order of the deliveries; one that is too long by itself goes alone."""
    sizes = [MAX_PUBLISHED // 2, MAX_PUBLISHED // 3, MAX_PUBLISHED // 3, 10, MAX_PUBLISHED + 1, 10, 10]
    deliveries = [
        job_pb2.Delivery(request_id=f"r{index}", chunk=inference_pb2.Chunk(text="x" * size))
        for index, size in enumerate(sizes)
    ]
    batches = list(commits.batches(deliveries))
    assert [[delivery.request_id for delivery, _ in batch] for batch in batches] == [
        ["r0", "r1"],
        ["r2", "r3"],
        ["r4"],
        ["r5", "r6"],
    ]
    assert all(sum(len(data) for _, data in batch) < MAX_BYTES for batch in batches)
    assert list(commits.batches([])) == []
