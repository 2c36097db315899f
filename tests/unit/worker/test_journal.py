"""Claims in, deliveries out."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest

from kvstore.jobs import Claim
from octavo.v1 import inference_pb2, job_pb2
from worker.journal import Journal
from worker.params import SamplingParams, StopParams
from worker.requests import request_of
from worker.sampling.draw import TokenLogprobs
from worker.sequence import Finish, Request
from worker.step import Output


def make_job(request_id: str = "r1", n: int = 1) -> job_pb2.Job:
    """Resolved, as the gateway leaves it."""
    job = job_pb2.Job(request_id=request_id, model="m", prompt_token_ids=[5, 6, 7], n=n, cache_salt="s")
    job.sampling.temperature = 0.5
    job.sampling.top_p = 0.75
    job.sampling.top_k = 9
    job.sampling.min_p = 0.25
    job.sampling.seed = 2**64 - 1
    job.sampling.repetition_penalty = 1.5
    job.sampling.presence_penalty = -0.5
    job.sampling.frequency_penalty = 2.0
    for token_id, bias in ((9, -1.5), (3, 2.0)):
        job.sampling.logit_bias[token_id] = bias
    job.stopping.max_tokens = 4
    job.stopping.min_tokens = 2
    job.stopping.stop.append("END")
    job.stopping.stop_token_ids.extend([8, 2])
    job.stopping.ignore_eos = True
    return job


def make_claim(
    request_id: str = "r1",
    *,
    n: int = 1,
    attempt: int = 1,
    entry: str = "1-0",
    remaining: int | None = None,
    past: tuple[int, ...] = (),
    ended: frozenset[int] = frozenset(),
    cached: int = 0,
) -> Claim:
    return Claim(make_job(request_id, n), attempt, remaining, 12, "gw", entry, past, ended, cached)


def make_output(**changes: object) -> Output:
    fields: dict[str, object] = {
        "request_id": "r1",
        "choice": 0,
        "start": 0,
        "token_ids": (11,),
        "text": "a",
        "cached_tokens": 2,
        "prompt_tokens": 3,
        "completion_tokens": 1,
    }
    return Output(**(fields | changes))  # type: ignore[arg-type]


def test_a_job_becomes_a_request_with_every_parameter() -> None:
    job = make_job(n=3)
    job.stopping.include_stop = True
    job.priority = -7
    job.logprobs = 0
    job.prompt_logprobs = 5
    assert request_of(job) == Request(
        "r1",
        (5, 6, 7),
        SamplingParams(
            temperature=0.5,
            top_p=0.75,
            top_k=9,
            min_p=0.25,
            seed=2**64 - 1,
            repetition_penalty=1.5,
            presence_penalty=-0.5,
            frequency_penalty=2.0,
            logit_bias=((3, 2.0), (9, -1.5)),
        ),
        StopParams(
            max_tokens=4, min_tokens=2, stop=("END",), stop_token_ids=(8, 2), ignore_eos=True, include_stop=True
        ),
        salt="s",
        n=3,
        priority=-7,
        logprobs=0,
        prompt_logprobs=5,
    )


def test_what_a_job_leaves_out_is_off() -> None:
    request = request_of(make_job(n=0))
    assert (request.n, request.priority, request.logprobs, request.prompt_logprobs) == (1, 0, None, None)


def test_every_field_of_a_job_reaches_the_engine() -> None:
    """A field that is added to the messages is to be added here, and to what the engine can do."""
    named = {field.name for message in (Request, SamplingParams, StopParams) for field in fields(message)}
    renamed = {"prompt_token_ids": "prompt", "cache_salt": "salt", "structure": "grammar"}
    wire = {
        field.name
        for message in (job_pb2.Job, inference_pb2.Sampling, inference_pb2.Stopping)
        for field in message.DESCRIPTOR.fields
    }
    # The tenant is part of the request id.
    assert {renamed.get(name, name) for name in wire} - {"model", "detached", "traceparent"} == named - {"tenant"}


def test_the_first_delivery_carries_the_route_and_the_last_the_usage() -> None:
    journal = Journal("w0")
    journal.open(make_claim(attempt=2), now=100.0)
    first = journal.record(make_output(), now=100.25)
    assert first is not None
    assert (first.request_id, first.attempt) == ("r1", 2)
    assert first.route == inference_pb2.Route(worker="w0", cached_tokens=2, queue_ms=12, prefill_ms=250)
    assert not first.HasField("usage")
    last = journal.record(
        make_output(start=1, token_ids=(12,), text="b", finish=Finish.LENGTH, completion_tokens=2), now=101.0
    )
    assert last is not None
    assert not last.HasField("route")
    assert last.chunk == inference_pb2.Chunk(start=1, token_ids=[12], text="b", finish=inference_pb2.LENGTH)
    assert last.usage == inference_pb2.Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=2, attempts=2)
    assert journal.running == {}


@pytest.mark.parametrize(("fetched", "told"), [(0, 0), (1, 1), (16, 2)])
def test_what_was_fetched_is_told_as_far_as_it_was_found(fetched: int, told: int) -> None:
    journal = Journal("w0")
    journal.open(make_claim(), now=100.0)
    journal.running["r1"].fetched_tokens = fetched
    first = journal.record(make_output(), now=100.25)
    assert first is not None
    assert (first.route.cached_tokens, first.route.fetched_tokens) == (2, told)


def test_a_chunk_carries_all_that_an_output_has() -> None:
    journal = Journal("w0")
    journal.open(make_claim(n=2), now=0.0)
    output = make_output(
        choice=1,
        finish=Finish.STOP,
        stop_match="END",
        stop_token=0,
        logprobs=(TokenLogprobs(11, -0.5, ((12, -0.25), (11, -0.5))),),
        prompt_logprobs=(TokenLogprobs(6, -2.0), TokenLogprobs(7, -math.inf)),
    )
    delivery = journal.record(output, now=1.0)
    assert delivery is not None
    chunk = delivery.chunk
    assert (chunk.choice, chunk.finish, chunk.stop_match) == (1, inference_pb2.STOP, "END")
    assert chunk.HasField("stop_token")
    assert chunk.stop_token == 0
    assert [(each.token_id, each.logprob, [(t.token_id, t.logprob) for t in each.top]) for each in chunk.logprobs] == [
        (11, -0.5, [(12, -0.25), (11, -0.5)])
    ]
    assert [(each.token_id, each.logprob) for each in chunk.prompt_logprobs] == [(6, -2.0), (7, -math.inf)]


def test_an_output_without_extras_has_a_chunk_without_them() -> None:
    journal = Journal("w0")
    journal.open(make_claim(), now=0.0)
    delivery = journal.record(make_output(), now=1.0)
    assert delivery is not None
    assert delivery.chunk == inference_pb2.Chunk(token_ids=[11], text="a")


def test_nobodys_leaving_ends_a_detached_job() -> None:
    journal = Journal("w0")
    detached = make_claim("a")
    detached.job.detached = True
    journal.open(detached, now=0.0)
    assert (journal.gateways(), journal.of_gateways({"gw"})) == (set(), [])
    journal.open(make_claim("b"), now=0.0)
    assert (journal.gateways(), journal.of_gateways({"gw"})) == ({"gw"}, [("b", "gw")])


# What goes wrong


def test_output_for_a_job_that_is_no_longer_held_is_not_delivered() -> None:
    journal = Journal("w0")
    journal.open(make_claim(), now=0.0)
    assert journal.drop("r1") is not None
    assert journal.record(make_output(), now=1.0) is None
    assert journal.drop("r1") is None


@pytest.mark.parametrize(("refused", "failure"), [(False, job_pb2.FAILURE_INTERNAL), (True, job_pb2.FAILURE_INVALID)])
def test_an_engine_error_is_ours_or_the_requests(refused: bool, failure: job_pb2.Failure) -> None:
    """Of the first kind some in a row keep a worker from getting jobs."""
    journal = Journal("w0")
    journal.open(make_claim(), now=0.0)
    output = make_output(token_ids=(), text="", finish=Finish.ERROR, error="non-finite logits", refused=refused)
    delivery = journal.record(output, now=1.0)
    assert delivery is not None
    assert delivery.failure == failure
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
    assert journal.settle(last, "1-0")
    assert not journal.holds(make_claim())


def test_outputs_of_an_earlier_request_with_the_same_id_are_not_the_jobs() -> None:
    journal = Journal("w0")
    journal.open(make_claim(), now=1.0, since=3)
    assert journal.drop("r1") is not None
    journal.open(make_claim(attempt=2), now=1.0, since=5)
    assert journal.record(make_output(), now=2.0, seen=4) is None
    delivery = journal.record(make_output(), now=2.0, seen=5)
    assert delivery is not None
    assert (delivery.attempt, delivery.chunk.start) == (2, 0)
