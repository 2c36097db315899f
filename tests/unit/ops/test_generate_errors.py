"""What is said when a call fails, and what is shown of an answer that is cut off."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import grpc
import grpc.aio
import pytest
from click.testing import CliRunner

from gateway.stream import CALL_AGAIN
from octavo.v1 import inference_pb2
from octavo.v1.inference_pb2 import (
    Chunk,
    GenerateResponse,
    Sampling,
    Stopping,
    Structure,
)
from ops import generate, streaming
from ops.answer import Answer
from ops.failures import FLAGS, failure, in_flags
from tests.unit.ops.service import GREETING, THREE, Service, response, run


def error_of(monkeypatch: pytest.MonkeyPatch, code: grpc.StatusCode, details: str, *arguments: str) -> str:
    """What is said when the call fails."""

    class Failing(Service):
        async def then(self) -> None:
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)

    ran = run(monkeypatch, Failing(), "p", *arguments)
    # Not even a line break: nothing was generated.
    assert (ran.exit_code, ran.stdout) == (1, "")
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
    monkeypatch.setattr(streaming, "Client", service := Service(*GREETING.responses))
    for stdin, told in (
        (b"x" * 5_000_000, "Error: the request has 5000045 bytes, and a gateway takes 4194304 (4 MiB) at most: "),
        (b"caf\xe9", "Error: stdin is not UTF-8: "),
    ):
        ran = CliRunner().invoke(generate.command, ["-"], input=stdin, prog_name="octavo generate")
        assert ran.exit_code in (1, 2)
        assert told in ran.stderr
    ran = run(monkeypatch, service, "caf\udce9")
    assert "Error: prompt, system message, model and stop strings must be UTF-8" in ran.stderr
    assert service.requests == []


@pytest.mark.parametrize(
    ("stdin", "prompt"),
    [("caf\u00e9", "caf\u00e9"), ("a\n", "a"), ("a\r\n", "a"), ("a\n\n", "a\n"), ("a\nb\n", "a\nb"), ("a\r", "a\r")],
)
def test_stdin_is_the_prompt_less_one_line_break(monkeypatch: pytest.MonkeyPatch, stdin: str, prompt: str) -> None:
    monkeypatch.setattr(streaming, "Client", service := Service(*GREETING.responses))
    ran = CliRunner().invoke(generate.command, ["-"], input=stdin.encode(), prog_name="octavo generate")
    assert (ran.exit_code, [request.text for request in service.requests]) == (0, [prompt])


def test_every_field_that_can_be_set_has_its_option() -> None:
    def fields(message: Any, prefix: str = "") -> set[str]:
        return {prefix + field.name for field in message.DESCRIPTOR.fields}

    without = {"token_ids", "cache_salt", "detached", "caller", "sampling", "stopping"}
    settable = fields(inference_pb2.GenerateRequest) - without
    settable |= fields(Sampling, "sampling.") | fields(Stopping, "stopping.") | fields(Structure, "structure.")
    assert settable | {"prompt", "chat.messages"} == set(FLAGS)
    known = {flag for param in generate.command.params for flag in (*param.opts, str(param.human_readable_name))}
    assert {flag for flag in FLAGS.values() if " " not in flag} <= known


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("text is empty: must have at least 1 character", "PROMPT is empty: must have at least 1 character"),
        ("sampling.top_k is 9: must be 0 (off) to 4", "--top-k is 9: must be 0 (off) to 4"),
        ("stopping.stop[1] is 'max_tokens is': must", "--stop[1] is 'max_tokens is': must"),
        (
            "stopping.min_tokens is 9: must be at most max_tokens, 5",
            "--min-tokens is 9: must be at most --max-tokens, 5",
        ),
        (
            "chat is set: the model has no chat template; send text or token_ids",
            "--chat is set: the model has no chat template; leave out --chat and --system",
        ),
        ("request_id 'r' is taken by another payload", "--request-id 'r' is taken by another payload"),
        ("something else entirely", "something else entirely"),
        ("tokens are short", "tokens are short"),
    ],
)
def test_errors_name_options(monkeypatch: pytest.MonkeyPatch, said: str, told: str) -> None:
    assert in_flags(said) == told
    assert error_of(monkeypatch, grpc.StatusCode.INVALID_ARGUMENT, said) == f"Error: INVALID_ARGUMENT: {told}\n"


def rpc_error(code: grpc.StatusCode, details: str, *initial: tuple[str, str]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(*initial), grpc.aio.Metadata(), details)


def test_what_may_go_on_is_told_with_the_id_to_ask_for() -> None:
    lost = grpc.StatusCode.UNAVAILABLE
    again = "the same command with --request-id r gets its answer"
    begun, ended = Answer("r"), Answer("r")
    begun.add(response(Chunk(token_ids=[1])), 1.0)
    ended.add(response(Chunk(token_ids=[1], finish=inference_pb2.ERROR, error="worker w0 died")), 1.0)
    accepted = ("octavo-request-id", "r")
    stopping, closed = "the gateway is stopping", "Socket closed"
    gone = "the request was given up, and cancelled unless it had ended by then"
    unheard = f"no gateway heard that it is cancelled, so it may go on: {again}"
    for error, answer, heard, told in (
        (rpc_error(lost, f"{stopping}; {CALL_AGAIN}"), begun, None, f"{stopping}; the request may go on: {again}"),
        (rpc_error(lost, f"{stopping}; {CALL_AGAIN}"), begun, True, f"{stopping}; {gone}"),
        (rpc_error(lost, closed), begun, None, f"{closed}; the request may go on: {again}"),
        (rpc_error(lost, closed), begun, True, f"{closed}; {gone}"),
        (rpc_error(lost, closed), begun, False, f"{closed}; {unheard}"),
        (rpc_error(lost, "x", accepted), Answer("r"), False, f"x; {unheard}"),
        (rpc_error(lost, "worker w0 died"), ended, None, "worker w0 died"),
        (rpc_error(lost, "no live worker"), Answer("r"), True, "no live worker"),
    ):
        assert failure(error, answer, None, heard) == f"UNAVAILABLE: {told}"


@pytest.mark.parametrize("heard", [True, False])
def test_what_was_given_up_is_told_as_the_client_has_it(monkeypatch: pytest.MonkeyPatch, heard: bool) -> None:
    class Tired(Service):
        async def then(self) -> None:
            self.on_farewell("r", heard)
            raise rpc_error(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    ran = run(monkeypatch, Tired(BEGUN), "p", "--request-id", "r")
    assert ("no gateway heard that it is cancelled" in ran.stderr, "given up, and cancelled" in ran.stderr) == (
        not heard,
        heard,
    )


class CutOff(Service):
    """The call fails, or Ctrl-C comes, after the responses."""

    def __init__(self, error: grpc.aio.AioRpcError | None, *responses: GenerateResponse) -> None:
        super().__init__(*responses)
        self.error = error

    async def then(self) -> None:
        if self.error is not None:
            raise self.error
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()


LATE = rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
BEGUN = response(Chunk(token_ids=[1], text="Hi"))


@pytest.mark.parametrize("come", [(), (BEGUN,)])
@pytest.mark.parametrize(("error", "code", "finish"), [(None, 130, "CANCELLED"), (LATE, 1, "ERROR")])
def test_json_of_an_answer_that_is_cut_off_has_what_came(
    monkeypatch: pytest.MonkeyPatch,
    error: grpc.aio.AioRpcError | None,
    code: int,
    finish: str,
    come: tuple[GenerateResponse, ...],
) -> None:
    ran = run(monkeypatch, CutOff(error, *come), "p", "--json", "--timeout", "9", "--request-id", "r")
    told = json.loads(ran.stdout)
    assert (ran.exit_code, told["request_id"], told["finish"]) == (code, "r", finish)
    assert (told["text"], told["token_ids"]) == (("Hi", [1]) if come else ("", []))
    reason = "interrupted" if error is None else "the answer was not whole within --timeout 9 s and was cancelled"
    assert told["error"].startswith(reason)
    assert list(told) == ["request_id", "text", "token_ids", "finish", "error", "usage", "route", "timings"]


def test_several_answers_that_are_cut_off_are_shown_as_far_as_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    come = THREE.responses[:2]
    ran = run(monkeypatch, CutOff(None, *come), "p", "--n", "3", "--json")
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert lines[-2] == {"choice": 0, "finish": "CANCELLED", "error": "interrupted"}
    assert list(lines[-1]) == ["request_id", "usage", "route", "timings"]
    assert [line["choice"] for line in lines[:-1] if "finish" in line] == [2, 1, 0]
    ran = run(monkeypatch, CutOff(None, *come), "p", "--n", "3")
    assert (ran.exit_code, ran.stderr) == (130, "octavo: interrupted\n")
    assert ran.stdout.endswith("--- choice 1 of 3 (STOP)\nB\nb\n\n--- choice 0 of 3 (CANCELLED)\nA\n\n")


@pytest.mark.parametrize("arguments", [(), ("--json",), ("--n", "2"), ("--n", "2", "--json")])
def test_nothing_is_printed_when_nothing_came(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    """The failure is told on stderr."""
    error_of(monkeypatch, grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses", *arguments)


def test_a_line_that_was_begun_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (None, LATE):
        assert run(monkeypatch, CutOff(error, BEGUN), "p").stdout == "Hi\n"


def test_waiting_for_gateways_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Troubled(Service):
        async def then(self) -> None:
            nothing = grpc.aio.Metadata()
            self.on_trouble(grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "Socket closed"))

    ran = run(monkeypatch, Troubled(*GREETING.responses), "p", "--target", "a:1", "--patience", "7")
    assert (ran.exit_code, ran.stdout) == (0, "Hi there\n")
    assert ran.stderr == (
        "octavo: no gateway at a:1 goes on (UNAVAILABLE: Socket closed); trying for 7 s, see --patience\n"
    )
