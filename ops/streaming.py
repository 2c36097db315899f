"""One answer, streamed to the terminal as it comes: what `octavo generate` and `octavo attach` have in common."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import click
import grpc
import grpc.aio

from gateway.access import OPEN
from gateway.client import PATIENCE_S, BrokenStream, Client
from kvstore.ranges import Finite
from ops import answer as answers
from ops.client import describe
from ops.printer import Printer
from ops.reach import reaching

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from octavo.v1 import inference_pb2
    from ops.answer import Answer
    from ops.reach import Target

    Ask = Callable[[Client], AsyncGenerator[inference_pb2.GenerateResponse, None]]
    Tell = Callable[[grpc.aio.AioRpcError, bool | None], str]


def streaming(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a command that streams an answer: whom to ask, and for how long."""
    for decorate in (
        reaching("HOST:PORT of a gateway; of several, with commas between."),
        click.option(
            "--patience",
            type=Finite(min=0),
            default=PATIENCE_S,
            show_default=True,
            help="Seconds to go on trying when a gateway is lost in the middle of an answer.",
        ),
    ):
        function = decorate(function)
    return function


async def stream(ask: Ask, tell: Tell, answer: Answer, *, target: Target, patience: float, as_json: bool) -> Answer:
    """Takes what comes of a call into the answer, and shows it. What no gateway takes is asked for once at each.

    `tell` says for people how a call has failed. It gets whether a gateway heard of the request's cancellation, where
    the client gave it up; None: it did not. Leaving the call early is leaving the job; what has come by then is shown.

    Raises:
        click.ClickException: the call failed.
    """
    printer = Printer(answer, as_json=as_json)
    farewells: list[bool] = []

    def trouble(error: grpc.aio.AioRpcError) -> None:
        printer.aside(
            f"no gateway at {target.text} goes on ({describe(error)}); trying for {patience:g} s, see --patience"
        )

    started = time.monotonic()
    try:
        try:
            async with (
                Client(
                    target.addresses,
                    patience_s=patience,
                    accept_s=0.0,
                    on_farewell=lambda _, told: farewells.append(told),
                    on_trouble=trouble,
                    access=target.access or OPEN,
                ) as client,
                aclosing(ask(client)) as responses,
            ):
                async for response in responses:
                    printer.text(answer.add(response, time.monotonic() - started))
                    printer.response(response)
        finally:
            answer.total_s = time.monotonic() - started
        answer.end(answer.total_s)
    except asyncio.CancelledError:
        printer.cut("CANCELLED", "interrupted", even_empty=True)
        raise
    except grpc.aio.AioRpcError as error:
        told = tell(error, farewells[-1] if farewells else None)
        printer.cut("ERROR", told, even_empty=error.code() is grpc.StatusCode.DEADLINE_EXCEEDED)
        raise click.ClickException(told) from error
    except (BrokenStream, answers.BrokenStream) as error:
        printer.cut("ERROR", str(error), even_empty=False)
        raise click.ClickException(str(error)) from error
    printer.end()
    return answer
