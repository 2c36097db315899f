"""The client that goes on elsewhere, against scripted gateways on real sockets."""

from __future__ import annotations

import ast
import socket
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path

import grpc
import grpc.aio
import pytest

from gateway import client as module
from gateway.client import BrokenStream, Client, prepared
from octavo.v1 import inference_pb2
from octavo.v1.inference_pb2 import ERROR, LENGTH, STOP, Chunk, GenerateRequest, GenerateResponse, Sampling
from tests.unit.gateway.scripted_gateway import (
    HALF,
    ID,
    REQUEST,
    REST,
    UNAVAILABLE,
    WHOLE,
    Accept,
    Act,
    Die,
    Fail,
    Hang,
    ended,
    error_of,
    heard,
    running,
    said,
    told,
)

pytestmark = pytest.mark.usefixtures("short_pauses")


async def test_an_answer_passes_as_it_is() -> None:
    first = said(0, 10, text="a")
    first.route.worker = "w0"
    async with running([[first, *HALF[1:], *REST]]) as fleet:
        assert await heard(fleet) == [first, *HALF[1:], *REST]
    (call,) = fleet.gateways[0].calls
    assert (call.verb, call.request, call.left) == ("Generate", REQUEST, None)


@pytest.mark.parametrize("cut", [Fail(UNAVAILABLE), Die(), Fail(grpc.StatusCode.UNKNOWN, "Stream removed")])
async def test_where_one_gateway_fails_the_next_goes_on(cut: Act) -> None:
    async with running([[*HALF, cut]], [REST]) as fleet:
        responses = await heard(fleet)
    assert told(responses) == WHOLE
    assert [each.usage.completion_tokens for each in responses if each.HasField("usage")] == [4]
    assert fleet.verbs == [["Generate"], ["Attach"]]
    assert fleet.gateways[1].calls[0].request == inference_pb2.AttachRequest(request_id=ID, after={0: 2})


async def test_one_gateway_alone_is_asked_again() -> None:
    async with running([[*HALF, Fail(UNAVAILABLE)], [Fail(UNAVAILABLE)], REST]) as fleet:
        assert told(await heard(fleet)) == WHOLE
    assert fleet.verbs == [["Generate", "Attach", "Attach"]]


async def test_a_job_that_nobody_knows_any_more_is_asked_for_again() -> None:
    """Its output comes from the start: what has come already is left out, text by its characters."""
    again: list[Act] = [said(0, 10), said(1, 11, text="ab"), *REST]
    async with running([[*HALF, Fail(UNAVAILABLE)]], [[Fail(grpc.StatusCode.NOT_FOUND)], again]) as fleet:
        assert told(await heard(fleet)) == WHOLE
    assert fleet.verbs == [["Generate"], ["Attach", "Generate"]]
    assert fleet.gateways[1].calls[1].request == fleet.gateways[0].calls[0].request


async def test_a_fleet_that_has_just_come_back_may_not_know_the_model_yet() -> None:
    unknown = Fail(grpc.StatusCode.NOT_FOUND)
    async with running([[*HALF, Fail(UNAVAILABLE)], [unknown], [unknown], [*HALF, *REST]]) as fleet:
        assert told(await heard(fleet)) == WHOLE
    assert fleet.verbs == [["Generate", "Attach", "Generate", "Generate"]]


@pytest.mark.parametrize(
    ("before", "verb"), [([], "Generate"), ([Accept()], "Attach"), ([GenerateResponse(request_id=ID)], "Attach")]
)
async def test_only_what_was_taken_is_attached_to(before: list[Act], verb: str) -> None:
    """Without a word of it the same request is sent again, which finds the job if there is one."""
    async with running([[*before, Fail(UNAVAILABLE)]], [[*HALF, *REST]]) as fleet:
        assert told(await heard(fleet)) == WHOLE
    assert fleet.verbs == [["Generate"], [verb]]
    assert fleet.gateways[1].calls[0].request.request_id == ID


async def test_a_gateway_that_is_not_there_is_passed_over_now_and_later() -> None:
    async with running([[Hang()]], [[*HALF, *REST]]) as fleet:
        await fleet.gateways[0].stop()
        async with Client(fleet.targets) as client:
            for _ in range(2):
                assert told([each async for each in client.generate(REQUEST)]) == WHOLE
            assert await client.cancel("other")
    assert fleet.verbs == [[], ["Generate", "Generate"]]
    assert fleet.gateways[1].cancelled == ["other"]


async def test_what_takes_connections_and_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    shorter = tuple((name, 200 if name == "grpc.min_reconnect_backoff_ms" else value) for name, value in module.OPTIONS)
    monkeypatch.setattr(module, "OPTIONS", shorter)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        first = f"127.0.0.1:{silent.getsockname()[1]}"
        async with running([[*HALF, *REST]]) as fleet, Client([first, *fleet.targets]) as client:
            assert told([each async for each in client.generate(REQUEST, timeout=20)]) == WHOLE
    assert fleet.verbs == [["Generate"]]


@pytest.mark.parametrize(
    "code", ["INVALID_ARGUMENT", "ALREADY_EXISTS", "NOT_FOUND", "INTERNAL", "DEADLINE_EXCEEDED", "UNIMPLEMENTED"]
)
async def test_what_the_service_says_of_the_request_is_the_end(code: str) -> None:
    async with running([[Fail(grpc.StatusCode[code])]], [REST]) as fleet:
        assert (await error_of(fleet)).code() is grpc.StatusCode[code]
    assert fleet.verbs == [["Generate"], []]


async def test_a_job_that_ended_with_an_error_is_not_asked_for_again() -> None:
    failed = said(2, finish=ERROR, error="worker w0 died")
    async with (
        running([[*HALF, failed, Fail(UNAVAILABLE, "worker w0 died")]], [REST]) as fleet,
        aclosing(Client(fleet.targets).generate(REQUEST)) as answer,
    ):
        responses = [await anext(answer) for _ in range(3)]
        with pytest.raises(grpc.aio.AioRpcError, match="worker w0 died"):
            await anext(answer)
    assert told(responses) == ([10, 11], "ab", ["ERROR"])
    assert fleet.verbs == [["Generate"], []]


async def test_an_answer_that_is_whole_needs_no_status() -> None:
    async with running([[*HALF, *REST, Die()]], [[Hang()]]) as fleet:
        assert told(await heard(fleet)) == WHOLE
    assert fleet.verbs == [["Generate"], []]


async def test_choices_end_once_each_whoever_tells_it() -> None:
    request = GenerateRequest()
    request.CopyFrom(REQUEST)
    request.n = 3
    first: list[Act] = [
        said(0, 10, choice=0),
        said(0, 20, choice=2, finish=STOP),
        said(0, 30, 31, choice=1, text="x"),
        Fail(UNAVAILABLE),
    ]
    last = GenerateResponse(
        chunks=[Chunk(choice=2, start=1, finish=STOP), Chunk(choice=0, start=1, token_ids=[11], finish=LENGTH)]
    )
    end = ended(2, 32, text="y")
    end.chunks[0].choice = 1
    async with running([first], [[last, end]]) as fleet:
        responses = await heard(fleet, request)
    assert [told(responses, choice) for choice in range(3)] == [
        ([10, 11], "", ["LENGTH"]),
        ([30, 31, 32], "xy", ["STOP"]),
        ([20], "", ["STOP"]),
    ]
    assert fleet.gateways[1].calls[0].request.after == {0: 1, 1: 2, 2: 1}


@pytest.mark.parametrize(
    ("acts", "reason"),
    [
        ([said(0, 10), said(2, 12)], "choice 0: a chunk starts at 2, expected 1"),
        ([said(0, 10), said(0, 10)], "choice 0: a chunk starts at 0, expected 1"),
        ([said(0, 10, choice=1)], "a chunk of choice 1, of 1"),
        ([ended(0, 10), said(1, 11)], "choice 0: a chunk after the terminal one"),
        ([said(0, 10)], "the call ended without a terminal chunk of choice 0"),
    ],
)
async def test_a_gateway_that_breaks_its_promises_is_told_of(acts: list[Act], reason: str) -> None:
    async with running([acts]) as fleet:
        with pytest.raises(BrokenStream, match=reason):
            await heard(fleet)


def test_whoever_asks_for_the_same_again_means_the_same() -> None:
    bare = GenerateRequest(text="p")
    one, other = prepared(bare), prepared(bare)
    assert bare == GenerateRequest(text="p")
    assert one.request_id != other.request_id
    assert one.sampling.seed != other.sampling.seed
    assert prepared(one) == one
    named = GenerateRequest(request_id="r", text="p")
    assert prepared(named).sampling.seed == prepared(named).sampling.seed
    assert prepared(named).sampling.HasField("seed")


@pytest.mark.parametrize(
    ("sampling", "seed"),
    [(Sampling(temperature=0), None), (Sampling(seed=5), 5), (Sampling(temperature=0, seed=0), 0)],
)
def test_a_seed_is_drawn_only_where_it_is_needed(sampling: Sampling, seed: int | None) -> None:
    asked = prepared(GenerateRequest(text="p", sampling=sampling)).sampling
    assert (asked.seed if asked.HasField("seed") else None) == seed


async def test_a_client_without_gateways_is_none() -> None:
    with pytest.raises(ValueError, match="at least one gateway"):
        Client([])


def test_it_can_be_taken_along() -> None:
    """It needs grpc and the protocol; of ours, the four files alone."""
    root = Path(__file__).parents[3]
    used = set()
    for name in ("client", "access", "asking", "merged"):
        for node in ast.walk(ast.parse((root / "gateway" / f"{name}.py").read_text())):
            if isinstance(node, ast.Import):
                used |= {each.name for each in node.names}
            elif isinstance(node, ast.ImportFrom):
                used.add(str(node.module))
    foreign = {name for name in used if name.partition(".")[0] not in sys.stdlib_module_names}
    assert foreign == {"grpc", "grpc.aio", "octavo.v1", "gateway.access", "gateway.asking", "gateway.merged"}
    code = "import sys, gateway.client; print(*{name.partition('.')[0] for name in sys.modules})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50)
    assert not {"torch", "redis", "click", "kvstore", "worker", "tokenizers"} & set(ran.stdout.split())
