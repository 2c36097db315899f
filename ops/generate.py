"""`octavo generate`: one request, streamed to the terminal."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from typing import Any

import click
import grpc.aio

from gateway.config import MAX_REQUEST_BYTES
from octavo.v1 import inference_pb2
from ops.client import Answer, BrokenStream, Client, describe, plain
from ops.config import DEFAULT_TARGET, option
from ops.console import emit, emit_json, unless_interrupted


def bias_of(text: str) -> tuple[int, float]:
    """ID=VALUE as a token id and a number."""
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no token id with a number, such as 50=-100") from error


@dataclass(frozen=True, slots=True)
class GenerateConfig:
    """What `octavo generate` was told. None, and nothing, leave it to the service, which knows the defaults."""

    prompt: str
    chat: bool = False
    system: str | None = None
    model: str = ""
    n: int = 1
    priority: int = 0
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    as_json: bool = False
    timeout: float | None = None
    """Seconds."""
    target: str = DEFAULT_TARGET


@click.command("generate")
@click.argument("prompt")
@click.option("--chat", is_flag=True, help="Send the prompt as a user's message, through the model's chat template.")
@click.option("--system", help="A system message before it; implies --chat.")
@click.option("--model", default="", help="Name of a served model. Default: the only one.")
@click.option("--n", type=click.IntRange(1, 2**32 - 1), default=1, help="So many answers to the one prompt.")
@click.option("--priority", type=int, default=0, help="The higher goes first.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Default: as many as the context has room for.")
@click.option("--min-tokens", type=click.IntRange(min=0), default=0, help="No end before so many.")
@click.option("--temperature", type=float, help="0 is greedy. Default: 1.")
@click.option("--top-p", type=float, help="Keep the most likely tokens up to this probability. Default: 1, all.")
@click.option("--top-k", type=int, help="Keep this many of the most likely tokens. Default: 0, all.")
@click.option("--min-p", type=float, help="Keep tokens this many times as likely as the likeliest. Default: 0, all.")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="The same seed gives the same answer.")
@click.option("--repetition-penalty", type=float, help="Above 1: against tokens of prompt and answer. Default: 1, off.")
@click.option("--presence-penalty", type=float, help="Above 0: against tokens of the answer. Default: 0, off.")
@click.option("--frequency-penalty", type=float, help="The same, as often as they are there. Default: 0, off.")
@click.option(
    "--logit-bias",
    type=bias_of,
    metavar="ID=VALUE",
    multiple=True,
    help="Add to a token's logit; may be given several times.",
)
@click.option("--stop", multiple=True, help="End before this text; may be given several times.")
@click.option(
    "--stop-token",
    type=click.IntRange(0, 2**32 - 1),
    multiple=True,
    help="End with this token id; may be given several times.",
)
@click.option("--include-stop", is_flag=True, help="Keep what ended the answer in its text.")
@click.option("--ignore-eos", is_flag=True, help="Go on past the model's own end token.")
@click.option(
    "--logprobs",
    type=click.IntRange(0, 2**32 - 1),
    help="Log-probabilities of the tokens, and of so many alternatives; with --json.",
)
@click.option(
    "--prompt-logprobs", type=click.IntRange(0, 2**32 - 1), help="The same for the prompt's tokens; with --json."
)
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object at the end; with --n, lines of JSON as they come."
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0.001),
    help="Seconds for the whole answer; it is cancelled then. Default: any.",
)
@option("--target", default=DEFAULT_TARGET, help="HOST:PORT of a gateway.")
def command(prompt: str, **values: Any) -> None:
    """Send one request and stream its answer to the terminal.

    PROMPT is text to go on from; `-` reads it from stdin. With --chat it is a question to answer. Several answers (--n)
    are shown whole, each when it has ended. Ctrl-C cancels.

    With --json the object has request_id, text, token_ids, finish (STOP or LENGTH), usage, route and timings; where
    there are any, stop_match or stop_token (what ended it), logprobs and prompt_logprobs. With --n, each line has
    choice (from 0) and what is new of it, text and token_ids; finish in its last one. The last line has what is about
    all: request_id, usage, route, timings.
    """
    config = GenerateConfig(prompt=from_stdin() if prompt == "-" else prompt, **values)
    if not config.as_json and (config.logprobs, config.prompt_logprobs) != (None, None):
        raise click.UsageError("log-probabilities are shown with --json only")
    try:
        request = build(config)
    except UnicodeEncodeError as error:
        raise click.UsageError("prompt, system message, model and stop strings must be UTF-8") from error
    except ValueError as error:
        raise click.UsageError(f"a number does not fit its field: {error}") from error
    if (size := request.ByteSize()) > MAX_REQUEST_BYTES:
        limit = f"a gateway takes {MAX_REQUEST_BYTES} (4 MiB) at most"
        raise click.ClickException(f"the request has {size} bytes, and {limit}: send a shorter prompt")
    asyncio.run(unless_interrupted(run(config, request)))


def from_stdin() -> str:
    """All of stdin.

    Raises:
        click.UsageError: it is no UTF-8.
    """
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"stdin is not UTF-8: {error}") from error


def build(config: GenerateConfig) -> inference_pb2.GenerateRequest:
    """The request that a configuration describes. What was left out stays unset.

    Raises:
        ValueError: a number is too large for the protocol, or negative.
    """
    request = inference_pb2.GenerateRequest(
        model=config.model,
        n=config.n,
        priority=config.priority,
        logprobs=config.logprobs,
        prompt_logprobs=config.prompt_logprobs,
        sampling=inference_pb2.Sampling(
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            seed=config.seed,
            repetition_penalty=config.repetition_penalty,
            presence_penalty=config.presence_penalty,
            frequency_penalty=config.frequency_penalty,
            logit_bias=dict(config.logit_bias),
        ),
        stopping=inference_pb2.Stopping(
            max_tokens=config.max_tokens,
            min_tokens=config.min_tokens,
            stop=config.stop,
            stop_token_ids=config.stop_token,
            ignore_eos=config.ignore_eos,
            include_stop=config.include_stop,
        ),
    )
    if config.chat or config.system is not None:
        if config.system is not None:
            request.chat.messages.add(role="system", content=config.system)
        request.chat.messages.add(role="user", content=config.prompt)
    else:
        request.text = config.prompt
    return request


async def run(config: GenerateConfig, request: inference_pb2.GenerateRequest) -> Answer:
    """The whole answer, shown as the configuration says. Leaving the call early cancels the job, within a step.

    Raises:
        click.ClickException: the call failed.
    """
    streams = config.n == 1 and not config.as_json
    async with Client(config.target) as client:
        try:
            answer = await client.generate(
                request,
                timeout=config.timeout,
                on_text=show if streams else None,
                on_response=None if config.n == 1 else (show_lines if config.as_json else show_ended),
            )
        except grpc.aio.AioRpcError as error:
            raise click.ClickException(failure(error, config)) from error
        except BrokenStream as error:
            raise click.ClickException(str(error)) from error
        finally:
            if streams:
                show("\n")
    if config.as_json and config.n == 1:
        emit_json(answer.as_dict())
    elif config.as_json:
        emit(json.dumps(answer.about()))
    return answer


def failure(error: grpc.aio.AioRpcError, config: GenerateConfig) -> str:
    """What went wrong with the call, for people."""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and config.timeout is not None:
        cure = "give it more, or ask for less with --max-tokens; `octavo queue` shows what waits"
        return f"the answer was not whole within --timeout {config.timeout:g} s and was cancelled: {cure}"
    return describe(error)


def show(text: str) -> None:
    """Text of the answer, seen at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def show_lines(response: inference_pb2.GenerateResponse, _answer: Answer) -> None:
    """Each chunk as a line of JSON: see the command's help."""
    for chunk in response.chunks:
        emit(json.dumps(chunk_as_dict(chunk)))


def chunk_as_dict(chunk: inference_pb2.Chunk) -> dict[str, Any]:
    """For the lines of `--json`: which choice, and what is new of it. Once a choice has `finish` it has ended; what
    ended it is named as in the JSON of one answer."""
    news = {name: value for name, value in plain(chunk).items() if value and name not in ("choice", "start")}
    told: dict[str, Any] = {"choice": chunk.choice, **news}
    if not chunk.finish:
        del told["finish"]
    if chunk.HasField("stop_token"):
        told["stop_token"] = chunk.stop_token
    return told


def show_ended(response: inference_pb2.GenerateResponse, answer: Answer) -> None:
    """The choices that end with this response, each whole under a heading."""
    for chunk in response.chunks:
        if chunk.finish:
            choice = answer.choices[chunk.choice]
            emit(f"--- choice {choice.index} of {answer.n} ({choice.finish})\n{choice.text}\n")
