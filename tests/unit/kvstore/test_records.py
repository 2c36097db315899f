"""What is read from a job's hash, and what a job is charged at."""

from __future__ import annotations

from kvstore import commits
from kvstore.limits import MAX_CHOICES
from kvstore.records import RECORD_FIELDS, JobState, charge, parse_job, parse_record
from kvstore.token_log import MAX_BYTES, MAX_PUBLISHED
from octavo.v1 import inference_pb2, job_pb2


def test_a_job_is_charged_its_prompt_once_and_every_answer_at_its_maximum() -> None:
    job = job_pb2.Job(prompt_token_ids=[1, 2, 3], stopping=inference_pb2.Stopping(max_tokens=10))
    for n, tokens in ((0, 13), (1, 13), (2, 23), (32, 323)):
        job.n = n
        assert charge(job) == tokens


def test_a_payload_that_no_gateway_wrote_is_no_job() -> None:
    job = job_pb2.Job(request_id="r", prompt_token_ids=[1], n=MAX_CHOICES)
    assert parse_job(job.SerializeToString(), "r") == job
    assert parse_job(job.SerializeToString(), "other") is None
    for n in (MAX_CHOICES + 1, 2**32 - 1):
        job.n = n
        assert parse_job(job.SerializeToString(), "r") is None
    assert parse_job(b"\x80\x04]", "r") is None
    assert parse_job(None, "r") is None


def test_a_record_tells_of_each_choice_of_the_job_and_no_others() -> None:
    fields = {
        "state": b"running",
        "attempt": b"1",
        "owner": b"i",
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
    record = parse_record("r", [fields.get(name) for name in RECORD_FIELDS], now_ms=2000)
    assert record is not None
    assert (record.state, record.finish, record.remaining_ms) == (JobState.RUNNING, None, None)
    assert (record.next, record.ends) == ({0: 7, 1: 0, 2: 4}, {2: inference_pb2.LENGTH})
    assert parse_record("r", [None] * len(RECORD_FIELDS), now_ms=0) is None
    assert len(set(RECORD_FIELDS)) == len(RECORD_FIELDS) == 12 + 2 * MAX_CHOICES


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
