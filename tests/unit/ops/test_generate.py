"""From options to a request, and what is shown of an answer."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from click.testing import CliRunner

from octavo.v1 import inference_pb2
from octavo.v1.inference_pb2 import Chunk, GenerateResponse, Sampling, Stopping, TokenLogprob, TokenLogprobs
from ops import generate
from ops.client import Answer
from ops.generate import GenerateConfig, build

if TYPE_CHECKING:
    from collections.abc import Callable

PLAIN = GenerateConfig("p")


def test_what_is_left_out_stays_unset() -> None:
    request = build(PLAIN)
    assert request == inference_pb2.GenerateRequest(text="p", n=1, sampling=Sampling(), stopping=Stopping())
    assert not any(request.sampling.HasField(field) for field in ("temperature", "min_p", "repetition_penalty"))
    assert not request.HasField("logprobs")


def test_zero_is_not_unset() -> None:
    request = build(replace(PLAIN, temperature=0.0, seed=0, top_k=0, logprobs=0, prompt_logprobs=0))
    assert all(request.sampling.HasField(name) for name in ("temperature", "seed", "top_k"))
    assert all(request.HasField(name) for name in ("logprobs", "prompt_logprobs"))


def test_a_system_message_makes_it_a_chat() -> None:
    messages = build(replace(PLAIN, system="s")).chat.messages
    assert [(each.role, each.content) for each in messages] == [("system", "s"), ("user", "p")]


class Service:
    """Stands where the gateway's client does: notes the request, gives the responses that it was told."""

    def __init__(self, *responses: GenerateResponse) -> None:
        self.responses = responses
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.target = ""

    def __call__(self, target: str) -> Service:
        self.target = target
        return self

    async def __aenter__(self) -> Service:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def generate(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        timeout: float | None,
        on_text: Callable[[str], None] | None,
        on_response: Callable[[GenerateResponse, Answer], None] | None,
    ) -> Answer:
        self.requests.append(request)
        answer = Answer(n=request.n)
        for response in self.responses:
            text = answer.add(response, 1.0)
            if on_text is not None:
                on_text(text)
            if on_response is not None:
                on_response(response, answer)
        answer.end(2.0)
        return answer


def run(monkeypatch: pytest.MonkeyPatch, service: Service, *arguments: str) -> Any:
    monkeypatch.setattr(generate, "Client", service)
    return CliRunner().invoke(generate.command, list(arguments), prog_name="octavo generate")


def response(*chunks: Chunk, **fields: Any) -> GenerateResponse:
    return GenerateResponse(request_id="r", chunks=chunks, **fields)


LAST = Chunk(start=1, token_ids=[2], text=" there", finish=inference_pb2.STOP)
GREETING = Service(response(Chunk(token_ids=[1], text="Hi")), response(LAST, usage={"completion_tokens": 2}))


def test_every_option_reaches_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    options = (
        "p --chat --system s --model m --n 2 --priority -5 --max-tokens 5 --min-tokens 2 --temperature 0.5 --top-p 0.25"
        " --top-k 7 --min-p 0.125 --seed 18446744073709551615 --repetition-penalty 1.5 --presence-penalty -0.5"
        " --frequency-penalty 2 --logit-bias 7=-100 --logit-bias 8=0.5 --stop a --stop b --stop-token 3 --stop-token 4"
        " --include-stop --ignore-eos --logprobs 0 --prompt-logprobs 3 --json --target there:1"
    )
    ends = [Chunk(choice=choice, finish=inference_pb2.STOP) for choice in range(2)]
    service = Service(response(*ends))
    ran = run(monkeypatch, service, *options.split())
    assert ran.exit_code == 0, ran.output
    assert service.target == "there:1"
    (request,) = service.requests
    assert [(each.role, each.content) for each in request.chat.messages] == [("system", "s"), ("user", "p")]
    request.ClearField("chat")
    assert request == inference_pb2.GenerateRequest(
        model="m",
        n=2,
        priority=-5,
        logprobs=0,
        prompt_logprobs=3,
        sampling=Sampling(
            temperature=0.5,
            top_p=0.25,
            top_k=7,
            min_p=0.125,
            seed=2**64 - 1,
            repetition_penalty=1.5,
            presence_penalty=-0.5,
            frequency_penalty=2.0,
            logit_bias={7: -100.0, 8: 0.5},
        ),
        stopping=Stopping(
            max_tokens=5, min_tokens=2, stop=["a", "b"], stop_token_ids=[3, 4], ignore_eos=True, include_stop=True
        ),
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--logit-bias", "5"), "'5' is no token id with a number"),
        (("--logit-bias", "a=1"), "'a=1' is no token id with a number"),
        (("--logit-bias", "-1=1"), "a number does not fit its field"),
        (("--top-k", "99999999999"), "a number does not fit its field: Value out of range: 99999999999"),
        (("--stop-token", "-1"), "Invalid value for '--stop-token'"),
        (("--seed", str(2**64)), "Invalid value for '--seed'"),
        (("--n", "0"), "Invalid value for '--n'"),
        (("--logprobs", "2"), "log-probabilities are shown with --json only"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_any_call(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], reason: str
) -> None:
    service = Service()
    ran = run(monkeypatch, service, "p", *arguments)
    assert (ran.exit_code, service.requests) == (2, [])
    assert reason in ran.output


def test_one_answer_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, GREETING, "p").output == "Hi there\n"


def test_one_answer_as_json_is_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    one = TokenLogprobs(token_id=1, logprob=-0.5, top=[TokenLogprob(token_id=9, logprob=-0.25)])
    last = Chunk(
        token_ids=[1], text="Hi", finish=inference_pb2.STOP, logprobs=[one], prompt_logprobs=[one], stop_token=1
    )
    told = json.loads(run(monkeypatch, Service(response(last)), "p", "--json", "--logprobs", "1").output)
    shown = {"token_id": 1, "logprob": -0.5, "top": [{"token_id": 9, "logprob": -0.25}]}
    assert (told["request_id"], told["text"], told["token_ids"], told["finish"]) == ("r", "Hi", [1], "STOP")
    assert (told["stop_token"], told["logprobs"], told["prompt_logprobs"]) == (1, [shown], [shown])
    bare = json.loads(run(monkeypatch, GREETING, "p", "--json").output)
    assert bare["usage"]["completion_tokens"] == 2
    # Nothing that is not there.
    assert list(bare) == ["request_id", "text", "token_ids", "finish", "usage", "route", "timings"]


THREE = Service(
    response(Chunk(token_ids=[1], text="A"), Chunk(choice=2, token_ids=[3], text="C")),
    response(
        Chunk(choice=2, start=1, finish=inference_pb2.LENGTH),
        Chunk(choice=1, token_ids=[2], text="B\nb", finish=inference_pb2.STOP),
    ),
    response(Chunk(start=1, token_ids=[4], text="a", finish=inference_pb2.STOP), usage={"completion_tokens": 4}),
)


def test_several_answers_are_shown_whole_each_when_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, THREE, "p", "--n", "3").output == (
        "--- choice 2 of 3 (LENGTH)\nC\n\n--- choice 1 of 3 (STOP)\nB\nb\n\n--- choice 0 of 3 (STOP)\nAa\n\n"
    )


def test_several_answers_as_json_are_a_line_per_chunk_and_one_about_all(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.loads(line) for line in run(monkeypatch, THREE, "p", "--n", "3", "--json").output.splitlines()]
    *chunks, about = lines
    assert chunks == [
        {"choice": 0, "token_ids": [1], "text": "A"},
        {"choice": 2, "token_ids": [3], "text": "C"},
        {"choice": 2, "finish": "LENGTH"},
        {"choice": 1, "token_ids": [2], "text": "B\nb", "finish": "STOP"},
        {"choice": 0, "token_ids": [4], "text": "a", "finish": "STOP"},
    ]
    assert (about["request_id"], about["usage"]["completion_tokens"]) == ("r", 4)
    assert list(about) == ["request_id", "usage", "route", "timings"]


def test_a_line_of_json_has_all_that_a_chunk_has() -> None:
    """Of a call with more than is usual: 0 is a token, and tells what ended the answer."""
    one = TokenLogprobs(token_id=0, logprob=-0.5)
    chunk = Chunk(
        choice=1,
        start=9,
        token_ids=[0],
        text="x",
        finish=inference_pb2.ERROR,
        stop_match="s",
        error="e",
        logprobs=[one],
        prompt_logprobs=[one],
        stop_token=0,
    )
    shown = {"token_id": 0, "logprob": -0.5, "top": []}
    assert generate.chunk_as_dict(chunk) == {
        "choice": 1,
        "token_ids": [0],
        "text": "x",
        "finish": "ERROR",
        "stop_match": "s",
        "error": "e",
        "logprobs": [shown],
        "prompt_logprobs": [shown],
        "stop_token": 0,
    }
    assert {field.name for field in Chunk.DESCRIPTOR.fields} == {"start", *generate.chunk_as_dict(chunk)}
    (help_text,) = [" ".join(str(generate.command.help).split())]
    assert all(f"{name}" in help_text for name in ("choice", "text", "token_ids", "finish", "stop_match", "stop_token"))


def error_of(monkeypatch: pytest.MonkeyPatch, code: grpc.StatusCode, details: str, *arguments: str) -> str:
    """What is said when the call fails."""

    class Failing(Service):
        async def generate(self, *_: Any, **__: Any) -> Answer:
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)

    ran = run(monkeypatch, Failing(), "p", *arguments)
    assert (ran.exit_code, ran.stdout.strip()) == (1, "")
    return str(ran.stderr)


def test_a_timeout_is_told_with_what_it_was_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for details in ("Deadline Exceeded", "the client's deadline passed"):
        assert error_of(monkeypatch, grpc.StatusCode.DEADLINE_EXCEEDED, details, "--timeout", "0.25") == (
            "Error: the answer was not whole within --timeout 0.25 s and was cancelled: "
            "give it more, or ask for less with --max-tokens; `octavo queue` shows what waits\n"
        )
    told = error_of(monkeypatch, grpc.StatusCode.RESOURCE_EXHAUSTED, "all queues are full", "--timeout", "1")
    assert told == "Error: RESOURCE_EXHAUSTED: all queues are full\n"


def test_a_request_of_five_megabytes_is_refused_before_any_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "Client", service := Service(*GREETING.responses))
    for stdin, told in (
        (b"x" * 5_000_000, "Error: the request has 5000011 bytes, and a gateway takes 4194304 (4 MiB) at most: "),
        (b"caf\xe9", "Error: stdin is not UTF-8: "),
    ):
        ran = CliRunner().invoke(generate.command, ["-"], input=stdin, prog_name="octavo generate")
        assert ran.exit_code in (1, 2)
        assert told in ran.stderr
    ran = run(monkeypatch, service, "caf\udce9")
    assert "Error: prompt, system message, model and stop strings must be UTF-8" in ran.stderr
    assert service.requests == []
    ran = CliRunner().invoke(generate.command, ["-"], input="caf\u00e9".encode(), prog_name="octavo generate")
    assert (ran.exit_code, [request.text for request in service.requests]) == (0, ["caf\u00e9"])
