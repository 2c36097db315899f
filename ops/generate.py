"""`octavo generate`: one request, streamed to the terminal."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import click
import grpc.aio

from octavo.v1 import inference_pb2
from ops.client import DEFAULT_TARGET, Answer, BrokenStream, Client, describe
from ops.config import option
from ops.console import emit_json, unless_interrupted


@click.command("generate")
@click.argument("prompt")
@click.option("--chat", is_flag=True, help="Send the prompt as a user's message, through the model's chat template.")
@click.option("--system", help="A system message before it; implies --chat.")
@click.option("--model", default="", help="Name of a served model. Default: the only one.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Default: as many as the context has room for.")
@click.option("--temperature", type=float, help="0 is greedy. Default: 1.")
@click.option("--top-p", type=float, help="Keep the most likely tokens up to this probability. Default: 1, all.")
@click.option("--top-k", type=int, help="Keep this many of the most likely tokens. Default: 0, all.")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="The same seed gives the same answer.")
@click.option("--stop", multiple=True, help="End before this text; may be given several times.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object at the end instead of a stream.")
@click.option("--timeout", type=click.FloatRange(min=0.001), help="Seconds for the whole answer.")
@option("--target", default=DEFAULT_TARGET, help="HOST:PORT of a gateway.")
def command(as_json: bool, target: str, timeout: float | None, **values: Any) -> None:
    """Send one request and stream its answer to the terminal.

    PROMPT is text to go on from; `-` reads it from stdin. With --chat it is a question to answer. Ctrl-C cancels.
    """
    if values["prompt"] == "-":
        values["prompt"] = sys.stdin.read()
    answer = asyncio.run(unless_interrupted(run(build(**values), target, timeout, stream=not as_json)))
    if as_json:
        emit_json(answer.as_dict())


def build(
    *,
    prompt: str,
    chat: bool,
    system: str | None,
    model: str,
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    stop: tuple[str, ...],
) -> inference_pb2.GenerateRequest:
    """The request that the options describe. What was left out stays unset: the gateway knows the defaults."""
    request = inference_pb2.GenerateRequest(
        model=model,
        sampling=inference_pb2.Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed),
        stopping=inference_pb2.Stopping(max_tokens=max_tokens, stop=stop),
    )
    if chat or system is not None:
        if system is not None:
            request.chat.messages.add(role="system", content=system)
        request.chat.messages.add(role="user", content=prompt)
    else:
        request.text = prompt
    return request


async def run(request: inference_pb2.GenerateRequest, target: str, timeout: float | None, *, stream: bool) -> Answer:
    """The whole answer, shown as it comes when `stream`. Leaving the call early cancels the job, within a step.

    Raises:
        click.ClickException: the call failed.
    """
    async with Client(target) as client:
        try:
            return await client.generate(request, timeout=timeout, on_text=show if stream else None)
        except grpc.aio.AioRpcError as error:
            raise click.ClickException(describe(error)) from error
        except BrokenStream as error:
            raise click.ClickException(str(error)) from error
        finally:
            if stream:
                show("\n")


def show(text: str) -> None:
    """Text of the answer, seen at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
