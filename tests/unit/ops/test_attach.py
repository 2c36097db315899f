"""`octavo attach`: what it asks for, what it shows, and what it says when that fails."""

from __future__ import annotations

import json

import grpc
import grpc.aio
import pytest

from gateway.access import OPEN
from gateway.stream import CALL_AGAIN
from octavo.v1 import inference_pb2
from octavo.v1.inference_pb2 import Chunk, GenerateResponse
from tests.unit.ops.service import Service, response, run_attach

LAST = response(Chunk(start=3, token_ids=[4], text=" there", finish=inference_pb2.STOP), usage={"completion_tokens": 4})
HALF = response(Chunk(start=2, token_ids=[3], text="Hi"), choices=1)
TWO = (
    response(Chunk(start=2, token_ids=[3], text="A"), Chunk(choice=1, token_ids=[9], text="B"), choices=2),
    response(Chunk(choice=1, start=1, token_ids=[8], text="b", finish=inference_pb2.STOP)),
    response(Chunk(start=3, finish=inference_pb2.LENGTH), usage={"completion_tokens": 5}),
)


def test_it_looks_on_from_where_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(HALF, LAST)
    ran = run_attach(monkeypatch, service, "r", "--after", "2", "--target", "a:1,b:2", "--patience", "5")
    assert (ran.exit_code, ran.stdout) == (0, "Hi there\n")
    assert service.attached == [("r", {0: 2}, True)]
    assert (service.targets, service.settings) == (["a:1", "b:2"], {"patience_s": 5.0, "accept_s": 0.0, "access": OPEN})


def test_json_is_that_of_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    told = json.loads(run_attach(monkeypatch, Service(HALF, LAST), "r", "--after", "0=2", "--json").stdout)
    assert list(told) == ["request_id", "text", "token_ids", "finish", "usage", "route", "timings"]
    assert (told["request_id"], told["text"], told["token_ids"], told["finish"]) == ("r", "Hi there", [3, 4], "STOP")


def test_several_choices_are_shown_as_generate_shows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(*TWO)
    ran = run_attach(monkeypatch, service, "r", "--after", "2")
    assert ran.stdout == "--- choice 1 of 2 (STOP)\nBb\n\n--- choice 0 of 2 (LENGTH)\nA\n\n"
    lines = [
        json.loads(line) for line in run_attach(monkeypatch, service, "r", "--after", "2", "--json").stdout.splitlines()
    ]
    assert [line.get("choice") for line in lines] == [0, 1, 1, 0, None]
    run_attach(monkeypatch, service, "r", "--after", "2", "--after", "1=7")
    assert service.attached[-1] == ("r", {0: 2, 1: 7}, True)


@pytest.mark.parametrize("after", ["x", "1=", "=x", "-1", "32=0"])
def test_an_after_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, after: str) -> None:
    service = Service(HALF, LAST)
    ran = run_attach(monkeypatch, service, "r", "--after", after)
    assert (ran.exit_code, service.attached) == (2, [])
    assert "--after" in ran.stderr


def test_a_request_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = run_attach(monkeypatch, Service(), "")
    assert (ran.exit_code, "must name a request" in ran.stderr) == (2, True)


@pytest.mark.parametrize(
    ("code", "said", "come", "told"),
    [
        (
            grpc.StatusCode.NOT_FOUND,
            "job 'r' is unknown, or ended too long ago",
            (),
            "job 'r' is unknown, or ended too long ago: output is kept for ten minutes after a request has ended; "
            "is the id right?",
        ),
        (
            grpc.StatusCode.INVALID_ARGUMENT,
            "after is of choice 2: the job has 2, counted from 0",
            (),
            "INVALID_ARGUMENT: --after is of choice 2: the job has 2, counted from 0",
        ),
        (
            grpc.StatusCode.UNAVAILABLE,
            f"the gateway is stopping; {CALL_AGAIN}",
            TWO[:1],
            "UNAVAILABLE: the gateway is stopping; the request may go on: "
            "`octavo attach r --after 3 --after 1=1` does too",
        ),
        (grpc.StatusCode.UNAVAILABLE, "no way", (), "UNAVAILABLE: no way"),
    ],
)
def test_failures_say_what_to_do(
    monkeypatch: pytest.MonkeyPatch, code: grpc.StatusCode, said: str, come: tuple[GenerateResponse, ...], told: str
) -> None:
    class Failing(Service):
        async def then(self) -> None:
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), said)

    ran = run_attach(monkeypatch, Failing(*come), "r", *(("--after", "2") if come else ()))
    assert (ran.exit_code, ran.stderr) == (1, f"Error: {told}\n")
