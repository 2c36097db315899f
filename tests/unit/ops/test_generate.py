"""From options to a request, and what is shown of an answer."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

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
    assert (bare["stop_token"], bare["usage"]["completion_tokens"]) == (None, 2)
    assert "logprobs" not in bare


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
    assert [(each["choice"], each["start"], each["token_ids"], each["text"], each["finish"]) for each in chunks] == [
        (0, 0, [1], "A", "FINISH_REASON_UNSPECIFIED"),
        (2, 0, [3], "C", "FINISH_REASON_UNSPECIFIED"),
        (2, 1, [], "", "LENGTH"),
        (1, 0, [2], "B\nb", "STOP"),
        (0, 1, [4], "a", "STOP"),
    ]
    assert (about["request_id"], about["usage"]["completion_tokens"]) == ("r", 4)
