"""Claims in, deliveries out."""

from __future__ import annotations

import pytest

from kvstore.jobs import Claim
from octavo.v1 import inference_pb2, job_pb2
from worker.journal import Journal, request_of
from worker.params import SamplingParams, StopParams
from worker.sequence import Finish
from worker.step import Output


def make_job(request_id: str = "r1") -> job_pb2.Job:
    job = job_pb2.Job(request_id=request_id, model="m", prompt_token_ids=[5, 6, 7], n=1, cache_salt="s")
    job.sampling.temperature = 0.5
    job.sampling.top_p = 0.75
    job.sampling.top_k = 9
    job.sampling.seed = 2**64 - 1
    job.stopping.max_tokens = 4
    job.stopping.stop.append("END")
    job.stopping.ignore_eos = True
    return job


def make_claim(request_id: str = "r1", *, attempt: int = 1, entry: str = "1-0", remaining: int | None = None) -> Claim:
    return Claim(make_job(request_id), attempt, remaining, 12, "gw", entry)


def make_output(**changes: object) -> Output:
    fields: dict[str, object] = {
        "request_id": "r1",
        "choice": 0,
        "start": 0,
        "token_ids": (11,),
        "text": "a",
        "finish": None,
        "stop_match": "",
        "error": "",
        "cached_tokens": 2,
        "prompt_tokens": 3,
        "completion_tokens": 1,
        "first": True,
    }
    return Output(**(fields | changes))  # type: ignore[arg-type]


def test_a_job_becomes_a_request_with_every_parameter() -> None:
    request = request_of(make_job())
    assert request.request_id == "r1"
    assert request.prompt == (5, 6, 7)
    assert request.sampling == SamplingParams(temperature=0.5, top_p=0.75, top_k=9, seed=2**64 - 1)
    assert request.stopping == StopParams(max_tokens=4, stop=("END",), ignore_eos=True)
    assert request.salt == "s"


def test_the_first_delivery_carries_the_route_and_the_last_the_usage() -> None:
    journal = Journal("w0")
    journal.open(make_claim(attempt=2), now=100.0)
    first = journal.record(make_output(), now=100.25)
    assert first is not None
    assert (first.request_id, first.attempt) == ("r1", 2)
    assert first.route == inference_pb2.Route(worker="w0", cached_tokens=2, queue_ms=12, prefill_ms=250)
    assert not first.HasField("usage")
    last = journal.record(
        make_output(start=1, token_ids=(12,), text="b", finish=Finish.LENGTH, completion_tokens=2, first=False),
        now=101.0,
    )
    assert last is not None
    assert not last.HasField("route")
    assert last.chunk == inference_pb2.Chunk(start=1, token_ids=[12], text="b", finish=inference_pb2.LENGTH)
    assert last.usage == inference_pb2.Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=2, attempts=2)
    assert journal.running == {}


def test_output_for_a_job_that_is_no_longer_held_is_not_delivered() -> None:
    journal = Journal("w0")
    journal.open(make_claim(), now=0.0)
    assert journal.drop("r1") is not None
    assert journal.record(make_output(), now=1.0) is None
    assert journal.drop("r1") is None


def test_failing_a_job_continues_its_index_and_counts_its_tokens() -> None:
    journal = Journal("w0")
    journal.open(make_claim(), now=0.0)
    journal.record(make_output(token_ids=(1, 2)), now=1.0)
    delivery = journal.fail("r1", job_pb2.FAILURE_DEADLINE, "too late")
    assert delivery is not None
    assert delivery.failure == job_pb2.FAILURE_DEADLINE
    assert delivery.chunk == inference_pb2.Chunk(start=2, finish=inference_pb2.ERROR, error="too late")
    assert delivery.usage == inference_pb2.Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=2, attempts=1)
    assert journal.fail("r1", job_pb2.FAILURE_DEADLINE, "too late") is None


def test_an_engine_error_is_an_internal_failure() -> None:
    journal = Journal("w0")
    journal.open(make_claim(), now=0.0)
    delivery = journal.record(
        make_output(token_ids=(), text="", finish=Finish.ERROR, error="non-finite logits"), now=1.0
    )
    assert delivery is not None
    assert delivery.failure == job_pb2.FAILURE_INTERNAL
    assert delivery.chunk.error == "non-finite logits"


def test_deadlines_run_from_the_claim() -> None:
    journal = Journal("w0")
    journal.open(make_claim("a", remaining=1500), now=10.0)
    journal.open(make_claim("b", remaining=None), now=10.0)
    assert journal.expired(11.4) == []
    assert journal.expired(11.5) == ["a"]


@pytest.mark.parametrize(
    ("claim", "held"), [(make_claim(), True), (make_claim(attempt=2), False), (make_claim(entry="2-0"), False)]
)
def test_only_the_same_claim_is_held(claim: Claim, held: bool) -> None:
    journal = Journal("w0")
    journal.open(make_claim(), now=0.0)
    assert journal.holds(claim) is held


def test_jobs_are_found_by_their_gateway() -> None:
    journal = Journal("w0")
    journal.open(make_claim("a"), now=0.0)
    assert journal.gateways() == {"gw"}
    assert journal.of_gateways({"gw"}) == [("a", "gw")]
    assert journal.of_gateways({"other"}) == []
    journal.read_by("a", "other")
    assert journal.gateways() == {"other"}
    assert journal.of_gateways({"other"}) == [("a", "other")]


def test_a_job_whose_end_is_not_committed_yet_is_not_taken_again() -> None:
    journal = Journal("w0")
    journal.open(make_claim(), now=0.0)
    last = journal.record(make_output(finish=Finish.STOP), now=1.0)
    assert last is not None
    assert journal.running == {}
    assert journal.holds(make_claim())
    journal.settle(last)
    assert not journal.holds(make_claim())
