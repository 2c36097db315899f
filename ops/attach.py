"""`octavo attach`: the output of a request that was sent before, streamed to the terminal."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import click
import grpc
import grpc.aio

from gateway.stream import CALL_AGAIN
from ops.answer import Answer
from ops.client import describe
from ops.console import unless_interrupted
from ops.failures import in_flags, may_go_on
from ops.ranges import AFTER
from ops.streaming import stream, streaming

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ops.reach import Target

FLAGS: Final = {"request_id": "ID", "after": "--after"}
"""What sets a field of the request."""


@click.command("attach")
@click.argument("request_id", metavar="ID")
@click.option(
    "--after",
    type=AFTER,
    multiple=True,
    metavar="N",
    help="Begin with token N, counted from 0; CHOICE=N for another choice than the first one. Repeatable. Default: 0.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object at the end; of several choices, lines as they come."
)
@streaming
def command(request_id: str, after: Sequence[tuple[int, int]], target: Target, patience: float, as_json: bool) -> None:
    """Stream the output of a request that was sent before, as octavo generate does.

    ID is the request's: its --request-id, request_id of its JSON, or what `octavo dead retry` told. What has come of it
    so far is shown at once, the rest as it comes. Output can be had for ten minutes after a request has ended.

    This only looks on: Ctrl-C ends nothing but the command, and what the request's own caller leaves still ends. When
    the gateway is lost, the next one of --target goes on, or the same one when it is back.
    """
    if not request_id:
        raise click.BadParameter("must name a request", param_hint="ID")
    starts = dict(after)
    answer = Answer(request_id=request_id, after=starts)
    work = stream(
        lambda client: client.attach(request_id, after=starts, watch=True),
        lambda error, _: failure(error, answer),
        answer,
        target=target,
        patience=patience,
        as_json=as_json,
    )
    asyncio.run(unless_interrupted(work))


def failure(error: grpc.aio.AioRpcError, answer: Answer) -> str:
    """What went wrong and what to do, for people. `answer`: as far as it had come."""
    code, details = error.code(), error.details() or "no details"
    if code is grpc.StatusCode.NOT_FOUND:
        return f"{details}: output is kept for ten minutes after a request has ended; is the id right?"
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return f"{code.name}: {in_flags(details, FLAGS)}"
    said = describe(error).removesuffix(f"; {CALL_AGAIN}")
    if code is grpc.StatusCode.UNAVAILABLE and may_go_on(error, answer):
        return f"{said}; the request may go on: `octavo attach {answer.request_id}{positions(answer)}` does too"
    return said


def positions(answer: Answer) -> str:
    """The options that go on behind what has come."""
    had = [(each.index, each.following) for each in answer.choices if each.following]
    return "".join(f" --after {index}={at}" if index else f" --after {at}" for index, at in had)
