"""What a client makes of a stream."""

from __future__ import annotations

import socket

import grpc
import grpc.aio
import pytest

from octavo.v1 import fleet_pb2, inference_pb2
from ops import client
from ops.answer import Answer, BrokenStream, plain
from ops.client import chat_request, describe


def response(start: int, ids: list[int], text: str = "", finish: int = 0) -> inference_pb2.GenerateResponse:
    chunk = inference_pb2.Chunk(start=start, token_ids=ids, text=text, finish=finish)
    return inference_pb2.GenerateResponse(request_id="r", chunks=[chunk])


def test_an_answer_is_the_sum_of_its_chunks() -> None:
    answer = Answer()
    first = response(0, [5, 6], "ab")
    first.route.worker = "w1"
    assert answer.add(first, 0.5) == "ab"
    assert answer.add(response(2, [7]), 1.0) == ""
    last = response(3, [8], "cd", inference_pb2.STOP)
    last.usage.prompt_tokens = 9
    assert answer.add(last, 2.0) == "cd"
    answer.end(2.1)
    assert (answer.request_id, answer.text, answer.token_ids, answer.finish) == ("r", "abcd", [5, 6, 7, 8], "STOP")
    assert (answer.first_token_s, answer.total_s, answer.seconds_per_token) == (0.5, 2.1, 0.5)
    told = answer.as_dict()
    assert told["route"]["worker"] == "w1"
    assert told["usage"] == {"prompt_tokens": 9, "cached_tokens": 0, "completion_tokens": 0, "attempts": 0}
    assert told["timings"] == {"first_token_s": 0.5, "seconds_per_token": 0.5, "total_s": 2.1}


def test_one_token_has_no_time_per_token() -> None:
    answer = Answer()
    answer.add(response(0, [5], "a", inference_pb2.LENGTH), 1.0)
    assert answer.seconds_per_token is None


@pytest.mark.parametrize("start", [0, 3])
def test_gaps_and_repeats_are_seen(start: int) -> None:
    answer = Answer()
    answer.add(response(0, [1, 2]), 0.1)
    with pytest.raises(BrokenStream, match=f"r: choice 0: a chunk starts at {start}, expected 2"):
        answer.add(response(start, [3]), 0.2)


def test_there_is_exactly_one_end() -> None:
    answer = Answer()
    answer.add(response(0, [1], finish=inference_pb2.STOP), 0.1)
    with pytest.raises(BrokenStream, match="after the terminal one"):
        answer.add(response(1, [2]), 0.2)
    with pytest.raises(BrokenStream, match="x ended without a terminal chunk of choice 0"):
        Answer(request_id="x").end(1.0)


def test_choices_each_have_their_own_chunks_and_end() -> None:
    answer = Answer(n=3)
    first, second, last = response(0, [1, 2], "ab"), response(0, [3], "c", inference_pb2.STOP), response(2, [4], "d")
    second.chunks[0].choice = 2
    second.chunks[0].stop_token = 3
    last.chunks.append(inference_pb2.Chunk(choice=1, finish=inference_pb2.LENGTH))
    assert [answer.add(each, time) for each, time in ((first, 1.0), (second, 2.0), (last, 3.0))] == ["ab", "", "d"]
    assert [(each.text, each.token_ids, each.finish, each.stop_token) for each in answer.choices] == [
        ("abd", [1, 2, 4], "", None),
        ("", [], "LENGTH", None),
        ("c", [3], "STOP", 3),
    ]
    assert answer.seconds_per_token == 1.0  # of the longest choice
    with pytest.raises(BrokenStream, match="r ended without a terminal chunk of choice 0"):
        answer.end(4.0)
    stray = response(0, [1])
    stray.chunks[0].choice = 3
    with pytest.raises(BrokenStream, match="r: a chunk of choice 3, of 3"):
        answer.add(stray, 4.0)


def test_a_chat_request_is_greedy_unless_told_otherwise() -> None:
    request = chat_request([("system", "s"), ("user", "u")], max_tokens=3, stop=["x"])
    assert request.sampling.HasField("temperature")
    assert request.sampling.temperature == 0.0
    assert [(each.role, each.content) for each in request.chat.messages] == [("system", "s"), ("user", "u")]
    assert (request.stopping.max_tokens, list(request.stopping.stop)) == (3, ["x"])
    assert not chat_request([("user", "u")]).stopping.HasField("max_tokens")


@pytest.mark.parametrize(
    ("code", "details", "told"),
    [
        ("UNAVAILABLE", "failed to connect to all addresses; x", "UNAVAILABLE: nothing answers there; is `octavo up` "),
        (
            "UNAVAILABLE",
            "DNS resolution failed for a:1: x",
            "UNAVAILABLE: no machine has that name; is --target right?",
        ),
        ("UNAVAILABLE", "errors resolving a:1: [x]", "UNAVAILABLE: no machine has that name; is --target right?"),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", "DEADLINE_EXCEEDED: the gateway did not answer in time"),
        ("UNAVAILABLE", "no live worker", "UNAVAILABLE: no live worker"),
        ("INTERNAL", "", "INTERNAL: no details"),
    ],
)
def test_errors_are_told_for_people(code: str, details: str, told: str) -> None:
    metadata = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode[code], metadata, metadata, details)
    assert describe(error).startswith(told)


@pytest.mark.parametrize("ask", ["workers", "queues", "model", "serves", "cancel"])
async def test_a_gateway_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, ask: str) -> None:
    """It listens, as one that was stopped in the middle of something does."""
    monkeypatch.setattr(client, "ASK_TIMEOUT_S", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        async with client.Client(f"127.0.0.1:{silent.getsockname()[1]}") as calls:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await getattr(calls, ask)(*(["r1"] if ask == "cancel" else []))
    assert describe(failed.value).startswith("DEADLINE_EXCEEDED: the gateway did not answer in time")


def test_keys_have_the_order_of_the_protocol_whatever_is_set() -> None:
    """At every depth."""
    usage = plain(inference_pb2.Usage(completion_tokens=3))
    assert list(usage.items()) == [
        ("prompt_tokens", 0),
        ("cached_tokens", 0),
        ("completion_tokens", 3),
        ("attempts", 0),
    ]
    tokens = inference_pb2.TokenLogprobs(top=[inference_pb2.TokenLogprob(logprob=-1)])
    told = plain(inference_pb2.Chunk(text="x", logprobs=[tokens]))
    assert list(told)[:5] == ["choice", "start", "token_ids", "text", "finish"]
    assert list(told["logprobs"][0]) == ["token_id", "logprob", "top"]
    assert list(told["logprobs"][0]["top"][0]) == ["token_id", "logprob"]


def test_plain_shows_every_field_and_numbers_as_numbers() -> None:
    assert plain(fleet_pb2.Queue(worker="w0", oldest_age_ms=2**40)) == {
        "worker": "w0",
        "undelivered": 0,
        "pending": 0,
        "oldest_age_ms": 2**40,
        "stream": "",
    }
