"""`octavo demo`: a fleet, eight questions under one long system prompt, four at a time, and what that cost."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
import grpc.aio

from kvstore.errors import KvError
from ops.answer import Answer, BrokenStream
from ops.child import ChildFailed
from ops.client import Client, chat_request, describe
from ops.config import FleetConfig, fleet_config, fleet_options
from ops.console import Loading, emit, emit_json, note, unless_interrupted
from ops.demo_text import CAPITAL_ANSWER, CAPITAL_QUESTION, QUESTIONS, SYSTEM_PROMPT
from ops.fleet import Fleet
from ops.show import print_table
from ops.tasks import all_or_first_error

if TYPE_CHECKING:
    from collections.abc import Sequence

AT_ONCE = 4
MAX_TOKENS = 48
TIMEOUT_S = 180.0
COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_yellow")
COLUMNS = ("request", "worker", "prompt tokens", "cached tokens", "first token", "tokens/s")


class Wrong(Exception):  # noqa: N818
    """The demo did not show what it is there to show."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A question and its whole answer."""

    question: str
    answer: Answer

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens after the first, per second."""
        step = self.answer.seconds_per_token
        return 1 / step if step else None


@click.command("demo")
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON, and no stream.")
@fleet_options(workers=2, grpc_port=0)
def command(as_json: bool, **values: Any) -> None:
    """Start a fleet, ask it eight questions under one long system prompt, show what happened, stop it.

    Four questions run at a time; their answers are shown line by line as they come. Exit status 0 when every answer
    ended well and the one about the capital of France is right.
    """
    try:
        asked = asyncio.run(unless_interrupted(run(fleet_config(values), stream=not as_json)))
        report(asked, as_json=as_json)
        check(asked)
    except (ChildFailed, KvError, Wrong, BrokenStream) as error:
        raise click.ClickException(str(error)) from error
    except grpc.aio.AioRpcError as error:
        raise click.ClickException(describe(error)) from error


async def run(config: FleetConfig, *, stream: bool) -> list[Asked]:
    """Starts the fleet, asks, stops the fleet."""
    started = time.monotonic()
    note(f"starting {config.workers} workers on {config.model}; a first start prepares the model, which takes longer")
    loading = Loading()
    async with Fleet(config, loading.sink, note) as fleet:
        loading.over = True
        note(f"ready to serve after {time.monotonic() - started:.1f} s: gRPC on {', '.join(fleet.targets)}")
        asked = await ask_all(fleet.targets[0], QUESTIONS, stream=stream)
        note("stopping")
    note("stopped")
    return asked


async def ask_all(target: str, questions: Sequence[str], *, stream: bool) -> list[Asked]:
    """Asks all, `AT_ONCE` at a time; answers in the order of the questions."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def ask(index: int, question: str) -> Asked:
        request = chat_request([("system", SYSTEM_PROMPT), ("user", question)], max_tokens=MAX_TOKENS)
        printer = LinePrinter(index + 1) if stream else None
        async with slots:
            if printer is not None:
                printer.title(question)
            answer = await client.generate(request, timeout=TIMEOUT_S, on_text=printer.push if printer else None)
            if printer is not None:
                printer.finish(answer.finish)
        return Asked(question, answer)

    async with Client(target) as client:
        return await all_or_first_error(ask(index, question) for index, question in enumerate(questions))


class LinePrinter:
    """Shows one of several answers that stream at the same time: whole lines, each under its request's number."""

    WIDTH = 72

    def __init__(self, number: int) -> None:
        self._prefix = click.style(f"{number} |", fg=COLOURS[(number - 1) % len(COLOURS)], bold=True)
        self._held = ""

    def title(self, question: str) -> None:
        """The question, when it is sent."""
        emit(f"{self._prefix} {click.style(question, bold=True)}")

    def push(self, text: str) -> None:
        """Takes text in and shows the lines that it completes."""
        lines, self._held = complete_lines(self._held + text, self.WIDTH)
        for line in lines:
            emit(f"{self._prefix} {line}")

    def finish(self, reason: str) -> None:
        """Shows what is left, and how the answer ended."""
        end = click.style({"STOP": "", "LENGTH": "..."}.get(reason, f"[{reason}]"), dim=True)
        if self._held.strip() or end:
            emit(f"{self._prefix} {self._held.strip()}{end}")
        self._held = ""


def complete_lines(text: str, width: int) -> tuple[list[str], str]:
    """Splits off the lines that are complete: by a line break, the end of a sentence, or `width` characters.

    Returns the lines, without blank ones, and what is still to be completed.
    """
    lines: list[str] = []
    while True:
        ends = [at + 1 for mark in (". ", "! ", "? ") if (at := text.find(mark)) >= 0]
        if (newline := text.find("\n")) >= 0:
            ends.append(newline)
        if len(text) > width:
            ends.append(space if (space := text.rfind(" ", 1, width)) > 0 else width)
        if not ends:
            return lines, text
        line, text = text[: min(ends)].strip(), text[min(ends) :].lstrip(" \n")
        if line:
            lines.append(line)


def report(asked: Sequence[Asked], *, as_json: bool) -> None:
    """The table: what each request cost."""
    if as_json:
        emit_json([{"question": each.question, **each.answer.as_dict()} for each in asked])
        return
    emit("")
    print_table(COLUMNS, [cells(index + 1, each) for index, each in enumerate(asked)])


def cells(number: int, asked: Asked) -> tuple[Any, ...]:
    """A request's line."""
    answer, speed = asked.answer, asked.tokens_per_second
    first = answer.first_token_s
    return (
        f"{number} {asked.question}",
        answer.route.worker if answer.route else "?",
        answer.usage.prompt_tokens if answer.usage else 0,
        answer.usage.cached_tokens if answer.usage else 0,
        f"{first * 1000:.0f} ms" if first is not None else "-",
        f"{speed:.1f}" if speed is not None else "-",
    )


def check(asked: Sequence[Asked]) -> None:
    """What must hold.

    Raises:
        Wrong: an answer that did not end well, or a wrong capital.
    """
    for each in asked:
        if each.answer.finish not in ("STOP", "LENGTH"):
            raise Wrong(f"{each.question!r} ended with {each.answer.finish}: {each.answer.error}")
    capital = next(each.answer.text for each in asked if each.question == CAPITAL_QUESTION)
    if CAPITAL_ANSWER not in capital:
        raise Wrong(f"the capital of France is {CAPITAL_ANSWER}, the answer was {capital!r}")
