"""`octavo generate`: one request, streamed to the terminal."""

from __future__ import annotations

import asyncio
import re
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from gateway.client import PATIENCE_S
from gateway.config import MAX_REQUEST_BYTES
from kvstore.limits import MAX_STOP_TOKENS, MAX_STOPS
from kvstore.ranges import Finite
from octavo.v1 import inference_pb2
from ops import ranges
from ops.answer import Answer
from ops.console import unless_interrupted
from ops.failures import failure
from ops.reach import DEFAULT, Target
from ops.streaming import stream, streaming


@dataclass(frozen=True, slots=True)
class GenerateConfig:
    """What `octavo generate` was told. None, and nothing, leave it to the service, which knows the defaults."""

    prompt: str
    chat: bool = False
    system: str | None = None
    model: str = ""
    request_id: str = ""
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
    json_schema: str | None = None
    regex: str | None = None
    json_object: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    as_json: bool = False
    timeout: float | None = None
    """Seconds."""
    patience: float = PATIENCE_S
    """Seconds for which an accepted request is asked for again when gateways fail."""
    target: Target = DEFAULT


@click.command("generate")
@click.argument("prompt")
@click.option("--chat", is_flag=True, help="Send the prompt as a user's message, through the model's chat template.")
@click.option("--system", help="A system message before it; implies --chat.")
@click.option("--model", default="", help="Name of a served model. Default: the only one.")
@click.option(
    "--request-id", default="", help="Names the request; the same one again attaches to it. Default: a new one."
)
@click.option("--n", type=ranges.CHOICES, default=1, help="So many answers to the one prompt.")
@click.option("--priority", type=ranges.PRIORITY, default=0, help="The higher goes first.")
@click.option("--max-tokens", type=ranges.TOKENS, help="From 1. Default: as many as the context has room for.")
@click.option("--min-tokens", type=ranges.TOKEN, default=0, help="No end before so many; up to --max-tokens.")
@click.option("--temperature", type=ranges.TEMPERATURE, help="0 is greedy. Default: 1.")
@click.option("--top-p", type=ranges.TOP_P, help="Keep the most likely tokens up to this probability. Default: 1, all.")
@click.option("--top-k", type=ranges.TOP_K, help="Keep so many likely tokens, up to the vocabulary. Default: 0, all.")
@click.option(
    "--min-p", type=ranges.MIN_P, help="Keep tokens this many times as likely as the likeliest. Default: 0, all."
)
@click.option("--seed", type=ranges.SEED, help="The same seed gives the same answer.")
@click.option(
    "--repetition-penalty",
    type=ranges.REPETITION,
    help="Above 1: against tokens of prompt and answer. Default: 1, off.",
)
@click.option("--presence-penalty", type=ranges.PENALTY, help="Above 0: against tokens of the answer. Default: 0, off.")
@click.option("--frequency-penalty", type=ranges.PENALTY, help="The same, as often as they are there. Default: 0, off.")
@click.option("--logit-bias", type=ranges.Bias(), multiple=True, help="Add -100 to 100 to a token's logit; repeatable.")
@click.option("--stop", multiple=True, help=f"End before this text; up to {MAX_STOPS} times.")
@click.option(
    "--stop-token", type=ranges.TOKEN, multiple=True, help=f"End with this token id; up to {MAX_STOP_TOKENS} times."
)
@click.option("--include-stop", is_flag=True, help="Keep what ended the answer in its text.")
@click.option("--ignore-eos", is_flag=True, help="Go on past the model's own end token.")
@click.option(
    "--json-schema",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    callback=lambda _context, _option, file: content_of(file),
    metavar="FILE",
    help="The answer is JSON of this schema.",
)
@click.option("--regex", help="The answer matches this expression, from its first to its last character.")
@click.option("--json-object", is_flag=True, help="The answer is a JSON object.")
@click.option(
    "--logprobs", type=ranges.TOP, help="Log-probabilities of the tokens, and of so many alternatives; with --json."
)
@click.option("--prompt-logprobs", type=ranges.TOP, help="The same for the prompt's tokens; with --json.")
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object at the end; with --n, lines of JSON as they come."
)
@click.option(
    "--timeout",
    type=Finite(min=0.001),
    help="Seconds for the whole answer; it is cancelled then. Default: any.",
)
@streaming
def command(prompt: str, **values: Any) -> None:
    """Send one request and stream its answer to the terminal.

    PROMPT is text to go on from; `-` reads it from stdin, less one line break at its end. With --chat it is a question
    to answer. Several answers (--n) are shown whole, each when it has ended. Ctrl-C cancels.

    When the gateway is lost in the middle of an answer, the next one of --target goes on with it, or the same one when
    it is back.

    With --json the object has request_id, text, token_ids, finish (STOP or LENGTH), usage, route and timings; where
    there are any, stop_match or stop_token (what ended it), logprobs and prompt_logprobs (by token id: the service
    sends no text of single tokens). With --n, each line has choice (from 0) and what is new of it, text and token_ids;
    finish in its last one. The last line has what is about all: request_id, usage, route, timings.

    An answer that is cut off is shown as far as it came; in JSON its finish is CANCELLED (Ctrl-C) or ERROR (--timeout,
    and failures), and error says more.
    """
    # An id of our own making: when the gateway is lost there is nobody left to tell one.
    values["request_id"] = values["request_id"] or uuid.uuid4().hex
    config = GenerateConfig(prompt=from_stdin() if prompt == "-" else prompt, **values)
    if not config.prompt:
        raise click.UsageError("PROMPT is empty")
    if sum((config.json_schema is not None, config.regex is not None, config.json_object)) > 1:
        raise click.UsageError("an answer has one form: --json-schema, --regex or --json-object")
    if not config.as_json and (config.logprobs, config.prompt_logprobs) != (None, None):
        raise click.UsageError("log-probabilities are shown with --json only")
    try:
        request = build(config)
    except UnicodeEncodeError as error:
        raise click.UsageError("prompt, system message, model and stop strings must be UTF-8") from error
    if (size := request.ByteSize()) > MAX_REQUEST_BYTES:
        limit = f"a gateway takes {MAX_REQUEST_BYTES} (4 MiB) at most"
        raise click.ClickException(f"the request has {size} bytes, and {limit}: send a shorter prompt")
    asyncio.run(unless_interrupted(run(config, request)))


def from_stdin() -> str:
    """All of stdin, less one line break at its end: that is how lines end, and no model should have to say it.

    Raises:
        click.UsageError: it is no UTF-8.
    """
    try:
        return re.sub(r"\r?\n\Z", "", sys.stdin.buffer.read().decode())
    except UnicodeDecodeError as error:
        raise click.UsageError(f"stdin is not UTF-8: {error}") from error


def content_of(file: Path | None) -> str | None:
    """All of a file, if there is one. Raises BadParameter when it can't be read, or is no UTF-8."""
    try:
        return None if file is None else file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise click.BadParameter(f"{file} is not UTF-8: {error}") from error
    except OSError as error:
        raise click.BadParameter(f"{file}: {error.strerror}") from error


def structure_of(config: GenerateConfig) -> inference_pb2.Structure | None:
    """The form that the answer is to have, if any."""
    if config.json_schema is not None:
        return inference_pb2.Structure(json_schema=config.json_schema)
    if config.regex is not None:
        return inference_pb2.Structure(regex=config.regex)
    return inference_pb2.Structure(json_object=True) if config.json_object else None


def build(config: GenerateConfig) -> inference_pb2.GenerateRequest:
    """The request that a configuration describes. What was left out stays unset.

    Raises:
        UnicodeEncodeError: a text that is no Unicode.
    """
    request = inference_pb2.GenerateRequest(
        request_id=config.request_id,
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
        structure=structure_of(config),
    )
    if config.chat or config.system is not None:
        if config.system is not None:
            request.chat.messages.add(role="system", content=config.system)
        request.chat.messages.add(role="user", content=config.prompt)
    else:
        request.text = config.prompt
    return request


async def run(config: GenerateConfig, request: inference_pb2.GenerateRequest) -> Answer:
    """The whole answer, shown as the configuration says. Leaving the call early cancels the job, within a step; what
    has come by then is shown.

    Raises:
        click.ClickException: the call failed.
    """
    answer = Answer(request_id=request.request_id, n=config.n)
    return await stream(
        lambda client: client.generate(request, timeout=config.timeout),
        lambda error, told: failure(error, answer, config.timeout, told),
        answer,
        target=config.target,
        patience=config.patience,
        as_json=config.as_json,
    )
