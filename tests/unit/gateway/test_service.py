"""What the service makes of requests and deliveries, without any I/O."""

from __future__ import annotations

import pytest

from gateway.dispatch import Sent
from gateway.responses import digest_of, most_tokens, response_of, seed_of
from kvstore.jobs import Submitted
from octavo.v1.inference_pb2 import Chunk, GenerateRequest, Route, Sampling, Structure, Usage
from octavo.v1.job_pb2 import Delivery


def test_a_digest_is_of_all_but_the_id() -> None:
    asked = GenerateRequest(request_id="r1", text="p", sampling=Sampling(logit_bias={1: 1.0, 2: 2.0}))
    again = GenerateRequest(request_id="r2", text="p", sampling=Sampling(logit_bias={2: 2.0, 1: 1.0}))
    assert digest_of(asked) == digest_of(again)
    assert (asked.request_id, again.request_id) == ("r1", "r2")
    others = [
        GenerateRequest(text="p", n=2),
        GenerateRequest(text="p", logprobs=0),
        GenerateRequest(text="p", priority=1),
        GenerateRequest(text="p", structure=Structure(json_object=True)),
        GenerateRequest(text="p", sampling=Sampling(logit_bias={1: 1.0, 2: 2.5})),
    ]
    assert len({digest_of(each) for each in (asked, *others)}) == 6


def test_a_seed_that_nobody_chose_is_the_same_for_whoever_submits_the_request_again() -> None:
    assert seed_of("r1", b"digest") == 17223497829131848563
    others = {seed_of("r1", b"digest"), seed_of("r2", b"digest"), seed_of("r1", b"other")}
    assert len(others) == 3
    assert all(0 <= each < 2**64 for each in others)


@pytest.mark.parametrize(("told", "shown"), [("w0", "w0"), ("", "w0"), ("w1", "w1")])
def test_the_route_says_where_and_what_was_expected_there(told: str, shown: str) -> None:
    """A worker that took the job from the one it was sent to has expectations of its own."""
    batch = [
        Delivery(chunk=Chunk(token_ids=[1]), route=Route(worker=told, queue_ms=5, predicted_cached_tokens=16)),
        Delivery(chunk=Chunk(choice=1, token_ids=[2], finish=1), usage=Usage(completion_tokens=2)),
    ]
    sent = Sent(Submitted.ACCEPTED, "w0", predicted=32)
    response = response_of("r", batch, sent, None)
    expected = Route(worker=shown, queue_ms=5, predicted_cached_tokens=16)
    assert (response.request_id, response.route) == ("r", expected)
    assert list(response.chunks) == [delivery.chunk for delivery in batch]
    assert not response.HasField("usage")
    assert response_of("r", batch[1:], sent, Usage(completion_tokens=9)).usage.completion_tokens == 9


def test_tokens_are_counted_by_choice() -> None:
    chunks = [Chunk(choice=choice, token_ids=[1]) for choice in (0, 1, 2, 1)]
    assert most_tokens(chunks) == 2
    assert most_tokens([Chunk(finish=1)]) == 0
    assert most_tokens([]) == 0
