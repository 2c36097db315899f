"""Clients against calls that are written by hand, without any server."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from bench.chaos.driver import Driver, Habits, by_attach
from bench.chaos.history import ATTACH, BAD, GENERATE, LOAD, Invoked, Recorder, Request, gather
from bench.chaos.retry_info import DETAILS, PLAIN, retry_after_ms
from bench.chaos.traffic import GREEDY, SEEDED, Payload, bad_payloads, payloads
from gateway.rpc import retry_details
from octavo.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

OK = grpc.StatusCode.OK
TARGETS = ["127.0.0.1:1", "127.0.0.1:2"]
"""Nobody listens there, and nobody is asked."""

Responses = list[inference_pb2.GenerateResponse]


def response(start: int, tokens: list[int], finish: int = 0, choice: int = 0) -> inference_pb2.GenerateResponse:
    made = inference_pb2.GenerateResponse(request_id="r0")
    made.chunks.add(choice=choice, start=start, token_ids=tokens, text="x" * len(tokens), finish=finish)
    if finish:
        made.usage.CopyFrom(inference_pb2.Usage(prompt_tokens=4, completion_tokens=start + len(tokens), attempts=1))
    return made


def error(code: grpc.StatusCode, retry_ms: int | None = None) -> grpc.aio.AioRpcError:
    trailing = [] if retry_ms is None else [(DETAILS, retry_details(code, "no", retry_ms))]
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), "no")


class Script:
    """Calls in order, each a list of responses and how it ends; None: never."""

    def __init__(self, *calls: tuple[Responses, grpc.aio.AioRpcError | grpc.StatusCode | None]) -> None:
        self.left = list(calls)
        self.asked: list[dict[int, int]] = []
        self.cancelled = 0

    def __call__(
        self, stub: Any, request: inference_pb2.GenerateRequest, have: Mapping[int, int], timeout: float
    ) -> tuple[str, dict[int, int], Any]:
        self.asked.append(dict(have))
        assert timeout > 0
        return (ATTACH if have else GENERATE), dict(have), self._Call(self, *self.left.pop(0))

    class _Call:
        def __init__(self, script: Script, responses: Responses, end: Any) -> None:
            self.script, self.responses, self.end = script, responses, end

        async def __aiter__(self) -> AsyncIterator[inference_pb2.GenerateResponse]:
            for each in self.responses:
                yield each
            if self.end is None:
                await asyncio.Event().wait()
            if isinstance(self.end, grpc.aio.AioRpcError):
                raise self.end

        def cancel(self) -> None:
            self.script.cancelled += 1


async def sent(script: Script, *, deadline_s: float = 30.0, n: int = 1) -> Request:
    """One request, to its end."""
    payload = Payload(inference_pb2.GenerateRequest(text="x", n=n), GREEDY)
    recorder = Recorder()
    habits = Habits(deadline_s=deadline_s, go_on=script)
    async with asyncio.timeout(20), Driver(TARGETS, recorder, seed=1, habits=habits) as driver:
        assert await driver.send(payload) == "r0"
    (request,) = gather(recorder.events).values()
    assert request.invoked == Invoked("r0", request.invoked.at, payload.digest, GREEDY, n, LOAD, deadline_s, expect="")
    return request


async def test_an_answer_is_recorded() -> None:
    request = await sent(Script(([response(0, [5, 6]), response(2, [7], finish=inference_pb2.STOP)], OK)))
    (call,) = request.calls
    assert [(one.choice, one.start, one.tokens, one.text, one.finish) for one in call.chunks] == [
        (0, 0, (5, 6), "xx", ""),
        (0, 2, (7,), "x", "STOP"),
    ]
    assert call.usage is not None
    assert (call.usage.prompt, call.usage.completion, call.usage.attempts) == (4, 3, 1)
    assert (call.status, call.began.verb, call.began.after) == ("OK", GENERATE, {})


async def test_a_call_that_breaks_is_gone_on_with_elsewhere() -> None:
    script = Script(
        ([], error(grpc.StatusCode.UNAVAILABLE)),
        ([response(0, [5, 6])], error(grpc.StatusCode.UNAVAILABLE)),
        ([response(2, [7])], error(grpc.StatusCode.UNAVAILABLE)),
        ([response(3, [8], finish=inference_pb2.LENGTH)], OK),
    )
    request = await sent(script)
    assert [call.status for call in request.calls] == ["UNAVAILABLE"] * 3 + ["OK"]
    assert script.asked == [{}, {}, {0: 2}, {0: 3}]
    assert [call.began.after for call in request.calls] == script.asked
    targets = [call.began.target for call in request.calls]
    assert all(before != after for before, after in pairwise(targets))


class Stub:
    """Notes what is asked, and answers with nothing."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def Generate(self, request: Any, timeout: float) -> str:  # noqa: N802 - as the service has it
        self.asked.append((request, timeout))
        return "generated"

    def Attach(self, request: Any, timeout: float) -> str:  # noqa: N802
        self.asked.append((request, timeout))
        return "attached"


def test_who_has_something_asks_for_the_rest() -> None:
    stub, request = Stub(), inference_pb2.GenerateRequest(request_id="r", text="x", n=2)
    assert by_attach(stub, request, {}, 3.0) == (GENERATE, {}, "generated")
    assert by_attach(stub, request, {1: 4}, 2.0) == (ATTACH, {1: 4}, "attached")
    assert stub.asked == [(request, 3.0), (inference_pb2.AttachRequest(request_id="r", after={1: 4}), 2.0)]
    assert Habits().go_on is by_attach


async def test_what_nobody_knows_any_more_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(
        ([response(0, [5, 6])], error(grpc.StatusCode.UNAVAILABLE)),
        ([], error(grpc.StatusCode.NOT_FOUND)),
        ([response(2, [7], finish=inference_pb2.STOP)], OK),
    )
    sent_again = Script(([response(0, [5])], error(grpc.StatusCode.UNAVAILABLE)))
    monkeypatch.setattr("bench.chaos.driver.by_replay", lambda *asked: (GENERATE, {}, sent_again(*asked)[2]))
    request = await sent(script)
    assert [(call.began.verb, call.status) for call in request.calls] == [
        (GENERATE, "UNAVAILABLE"),
        (ATTACH, "NOT_FOUND"),
        (GENERATE, "UNAVAILABLE"),
        (ATTACH, "OK"),
    ]
    assert script.asked == [{}, {0: 2}, {0: 1}]
    assert sent_again.asked == [{0: 2}]


async def test_who_is_told_to_wait_waits() -> None:
    request = await sent(
        Script(([], error(grpc.StatusCode.RESOURCE_EXHAUSTED, 300)), ([response(0, [5], inference_pb2.STOP)], OK))
    )
    first, second = request.calls
    assert first.ended is not None
    assert (first.status, first.ended.retry_after_ms, first.ended.message) == ("RESOURCE_EXHAUSTED", 300, "no")
    assert second.began.at - first.ended.at >= 0.3


@pytest.mark.parametrize(
    "code", ["INVALID_ARGUMENT", "NOT_FOUND", "INTERNAL", "DEADLINE_EXCEEDED", "CANCELLED", "UNKNOWN"]
)
async def test_other_errors_are_the_end(code: str) -> None:
    request = await sent(Script(([], error(grpc.StatusCode[code]))))
    assert [call.status for call in request.calls] == [code]


async def test_terminal_chunks_are_the_end_of_all_choices() -> None:
    failed = [response(0, [], inference_pb2.ERROR), response(0, [], inference_pb2.ERROR, choice=1)]
    request = await sent(Script((failed, error(grpc.StatusCode.UNAVAILABLE))), n=2)
    assert [call.status for call in request.calls] == ["UNAVAILABLE"]
    one_only = Script((failed[:1], error(grpc.StatusCode.UNAVAILABLE)), (failed, error(grpc.StatusCode.UNAVAILABLE)))
    assert len((await sent(one_only, n=2)).calls) == 2


async def test_nobody_tries_beyond_the_deadline() -> None:
    script = Script(*[([], error(grpc.StatusCode.UNAVAILABLE)) for _ in range(100)])
    request = await sent(script, deadline_s=0.5)
    assert 2 <= len(request.calls) < 20
    assert request.calls[-1].began.at - request.invoked.at < 0.5


async def test_a_call_that_hangs_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.chaos.driver.HANGS_S", 0.1)
    script = Script(([response(0, [5])], None))
    request = await sent(script, deadline_s=0.1)
    (call,) = request.calls
    assert (call.ended, len(call.chunks), script.cancelled) == (None, 1, 1)


class TestTraffic:
    def test_the_same_for_the_same_seed(self) -> None:
        one, other = payloads(1, 40), payloads(1, 40)
        assert [payload.digest for payload in one] == [payload.digest for payload in other]
        assert not {payload.digest for payload in one} & {payload.digest for payload in payloads(2, 40)}

    def test_half_is_greedy_and_half_has_a_seed(self) -> None:
        made = payloads(3, 60)
        assert Counter(payload.kind for payload in made) == {GREEDY: 30, SEEDED: 30}
        for payload in made:
            sampling = payload.request.sampling
            assert (sampling.temperature == 0.0) == (payload.kind == GREEDY)
            assert sampling.HasField("seed") == (payload.kind == SEEDED)
            assert 8 <= payload.request.stopping.max_tokens <= 96
        assert len({payload.digest for payload in made}) == 60
        assert {payload.n for payload in made} == {1, 2, 3}

    def test_a_name_is_no_part_of_the_payload(self) -> None:
        payload = payloads(1, 1)[0]
        named = payload.named("id")
        assert (named.request_id, payload.request.request_id) == ("id", "")
        named.request_id = ""
        assert named == payload.request

    def test_bad_ones_differ_and_say_what_is_right(self) -> None:
        bad = bad_payloads()
        assert len({payload.digest for payload in bad}) == len(bad) == 5
        assert {payload.expect for payload in bad} == {"INVALID_ARGUMENT"}


async def test_a_load_has_its_share_of_everything() -> None:
    def at_once(stub: Any, request: Any, have: Any, timeout: float) -> tuple[str, dict[int, int], Any]:
        return GENERATE, {}, Script._Call(Script(), [response(0, [5], inference_pb2.STOP)], OK)

    recorder = Recorder()
    habits = Habits(rate=400.0, bad=0.3, cancels=0.0, go_on=at_once, merged_every=0)
    async with Driver(TARGETS, recorder, seed=5, habits=habits) as driver:
        await driver.load(payloads(1, 10), bad_payloads(), 0.5)
        await driver.ask_each(payloads(1, 3))
        await driver.probe(payloads(1, 1))
    requests = gather(recorder.events)
    roles = Counter(request.invoked.role for request in requests.values())
    assert roles["probe"] == 2
    assert {request.calls[0].began.target for request in requests.values() if request.invoked.role == "probe"} == set(
        TARGETS
    )
    assert 0.1 < roles[BAD] / (roles[BAD] + roles[LOAD]) < 0.5
    assert all(request.invoked.expect for request in requests.values() if request.invoked.role == BAD)
    assert list(requests) == [f"r{number}" for number in range(len(requests))]


@pytest.mark.parametrize("milliseconds", [0, 1, 999, 1000, 123_456])
def test_retry_info_is_read(milliseconds: int) -> None:
    details = retry_details(grpc.StatusCode.RESOURCE_EXHAUSTED, "full " * 100, milliseconds)
    assert retry_after_ms([("other", "x"), (DETAILS, details)]) == milliseconds


@pytest.mark.parametrize("name", PLAIN)
def test_what_stands_there_plainly_is_read_where_details_say_nothing(name: str) -> None:
    assert retry_after_ms([(name, "250")]) == 250
    details = retry_details(grpc.StatusCode.UNAVAILABLE, "no", 700)
    assert retry_after_ms([(name, "250"), (DETAILS, details)]) == 700
    assert retry_after_ms([(name, "250"), (DETAILS, b"\xff")]) == 250
    for nonsense in ("", "soon", "-1", "\u0663", b"250"):
        assert retry_after_ms([(name, nonsense)]) is None


@pytest.mark.parametrize("details", [b"", b"\x08\x08", b"\x1a\xff", b"\x1a\x02\xff\xff", b"\x1b", b"\xff" * 12])
def test_what_is_no_retry_info_is_none(details: bytes) -> None:
    assert retry_after_ms([(DETAILS, details)]) is None
    assert retry_after_ms(None) is None
