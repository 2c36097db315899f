"""From options to a request, and what is shown of an answer."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import click
import pytest
from click.testing import CliRunner

from gateway import admission
from gateway.access import OPEN
from gateway.errors import AdmissionError
from octavo.v1 import inference_pb2
from octavo.v1.inference_pb2 import (
    Chunk,
    Sampling,
    Stopping,
    TokenLogprob,
    TokenLogprobs,
)
from ops import generate
from ops.generate import GenerateConfig, build
from ops.printer import chunk_as_dict
from tests.unit.ops.service import GREETING, THREE, Service, response, run

if TYPE_CHECKING:
    from pathlib import Path

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


FORMS = {
    "--json-schema": inference_pb2.Structure(json_schema='{"title": "é"}'),
    "--regex": inference_pb2.Structure(regex="a|b"),
    "--json-object": inference_pb2.Structure(json_object=True),
}


@pytest.mark.parametrize("option", FORMS)
def test_an_answer_may_be_given_a_form(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"title": "é"}', encoding="utf-8")
    values = {"--json-schema": [str(schema)], "--regex": ["a|b"], "--json-object": []}
    service = Service(response(Chunk(finish=inference_pb2.STOP)))
    ran = run(monkeypatch, service, "p", option, *values[option])
    assert ran.exit_code == 0, ran.output
    (request,) = service.requests
    assert request.structure == FORMS[option]
    both = run(monkeypatch, service, "p", *(word for name in values for word in [name, *values[name]]))
    assert (both.exit_code, "an answer has one form" in both.output) == (2, True)
    schema.write_bytes(b"\xff")
    spoilt = run(monkeypatch, service, "p", "--json-schema", str(schema))
    assert (spoilt.exit_code, "schema.json is not UTF-8" in spoilt.output) == (2, True)


def test_every_option_reaches_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    options = (
        "p --chat --system s --model m --n 2 --priority -5 --max-tokens 5 --min-tokens 2 --temperature 0.5 --top-p 0.25"
        " --top-k 7 --min-p 0.125 --seed 18446744073709551615 --repetition-penalty 1.5 --presence-penalty -0.5"
        " --frequency-penalty 2 --logit-bias 7=-100 --logit-bias 8=0.5 --stop a --stop b --stop-token 3 --stop-token 4"
        " --include-stop --ignore-eos --request-id i --logprobs 0 --prompt-logprobs 3 --json --patience 5"
        " --target there:1,here:2"
    )
    ends = [Chunk(choice=choice, finish=inference_pb2.STOP) for choice in range(2)]
    service = Service(response(*ends))
    ran = run(monkeypatch, service, *options.split())
    assert ran.exit_code == 0, ran.output
    assert (service.targets, service.settings) == (
        ["there:1", "here:2"],
        {"patience_s": 5.0, "accept_s": 0.0, "access": OPEN},
    )
    (request,) = service.requests
    assert [(each.role, each.content) for each in request.chat.messages] == [("system", "s"), ("user", "p")]
    request.ClearField("chat")
    assert request == inference_pb2.GenerateRequest(
        request_id="i",
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
        (("--logit-bias", "-1=1"), "Invalid value for '--logit-bias': -1 is not in the range 0<=x<=4294967295."),
        (("--logit-bias", "5=1e39"), "Invalid value for '--logit-bias': 1e+39 is not in the range -100.0<=x<=100.0."),
        (("--top-k", "99999999999"), "Invalid value for '--top-k': 99999999999 is not in the range 0<=x<=2147483647."),
        (("--max-tokens", str(2**32)), "Invalid value for '--max-tokens': 4294967296 is not in the range 1<=x<="),
        (("--n", "33"), "Invalid value for '--n': 33 is not in the range 1<=x<=32."),
        (("--logprobs", "21"), "Invalid value for '--logprobs': 21 is not in the range 0<=x<=20."),
        (("--temperature", "1e39"), "Invalid value for '--temperature': 1e+39 is not in the range 0<=x<=100.0."),
        (("--chat",), "PROMPT is empty"),
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
    ran = run(monkeypatch, service, "" if arguments == ("--chat",) else "p", *arguments)
    assert (ran.exit_code, service.requests) == (2, [])
    assert reason in ran.output


def test_one_answer_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, GREETING, "p").output == "Hi there\n"


def test_one_answer_as_json_is_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    one = TokenLogprobs(token_id=1, logprob=-0.5, top=[TokenLogprob(token_id=9, logprob=-0.25)])
    last = Chunk(
        token_ids=[1], text="Hi", finish=inference_pb2.STOP, logprobs=[one], prompt_logprobs=[one], stop_token=1
    )
    told = json.loads(
        run(monkeypatch, Service(response(last)), "p", "--json", "--logprobs", "1", "--request-id", "r").output
    )
    shown = {"token_id": 1, "logprob": -0.5, "top": [{"token_id": 9, "logprob": -0.25}]}
    assert (told["request_id"], told["text"], told["token_ids"], told["finish"]) == ("r", "Hi", [1], "STOP")
    assert (told["stop_token"], told["logprobs"], told["prompt_logprobs"]) == (1, [shown], [shown])
    bare = json.loads(run(monkeypatch, GREETING, "p", "--json").output)
    assert bare["usage"]["completion_tokens"] == 2
    # Nothing that is not there.
    assert list(bare) == ["request_id", "text", "token_ids", "finish", "usage", "route", "timings"]


def test_several_answers_are_shown_whole_each_when_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, THREE, "p", "--n", "3").output == (
        "--- choice 2 of 3 (LENGTH)\nC\n\n--- choice 1 of 3 (STOP)\nB\nb\n\n--- choice 0 of 3 (STOP)\nAa\n\n"
    )


def test_several_answers_as_json_are_a_line_per_chunk_and_one_about_all(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = run(monkeypatch, THREE, "p", "--n", "3", "--json", "--request-id", "r")
    lines = [json.loads(line) for line in ran.output.splitlines()]
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
        abandoned=True,
    )
    shown = {"token_id": 0, "logprob": -0.5, "top": []}
    assert chunk_as_dict(chunk) == {
        "choice": 1,
        "token_ids": [0],
        "text": "x",
        "finish": "ERROR",
        "stop_match": "s",
        "error": "e",
        "logprobs": [shown],
        "prompt_logprobs": [shown],
        "stop_token": 0,
        "abandoned": True,
    }
    assert {field.name for field in Chunk.DESCRIPTOR.fields} == {"start", *chunk_as_dict(chunk)}
    (help_text,) = [" ".join(str(generate.command.help).split())]
    assert all(f"{name}" in help_text for name in ("choice", "text", "token_ids", "finish", "stop_match", "stop_token"))


EDGES = [
    ("--n", 1, 32, 33),
    ("--priority", -100, 100, 101),
    ("--logprobs", 0, 20, 21),
    ("--prompt-logprobs", 0, 20, 21),
    ("--temperature", 0, 100, 100.01),
    ("--top-p", 1e-6, 1, 1.01),
    ("--min-p", 0, 1, 1.01),
    ("--repetition-penalty", 0.01, 100, 100.01),
    ("--presence-penalty", -2, 2, 2.01),
    ("--frequency-penalty", -2, 2, 2.01),
]


@pytest.mark.parametrize(("flag", "least", "most", "more"), EDGES)
def test_the_range_of_an_option_is_the_gateways(flag: str, least: float, most: float, more: float) -> None:
    """Whose own bounds are checked by tests of their own: what passes here passes there, and beyond neither does."""
    (param,) = (each for each in generate.command.params if flag in each.opts)
    for value, fits in ((least, True), (most, True), (more, False)):
        request = build(replace(PLAIN, **{str(param.name): value}))  # type: ignore[arg-type]
        if fits:
            param.type.convert(str(value), param, None)
            admission.check(request)
            continue
        with pytest.raises(click.BadParameter):
            param.type.convert(str(value), param, None)
        with pytest.raises(AdmissionError, match=param.name):
            admission.check(request)


def test_help_shows_real_limits_only() -> None:
    shown = CliRunner().invoke(generate.command, ["--help"], terminal_width=200).output
    assert "4294967295" not in shown
    assert "[1<=x<=32]" in shown
