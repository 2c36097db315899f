"""`octavo dead`: jobs that too many workers died of, kept for operators."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click
import grpc.aio

from ops.answer import plain
from ops.client import Client, describe
from ops.console import emit, emit_json
from ops.reach import reaching
from ops.show import print_table

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from octavo.v1 import fleet_pb2
    from ops.reach import Target

T = TypeVar("T")
COLUMNS = ("id", "model", "worker", "attempts", "prompt", "died", "reason")


@click.group("dead")
def command() -> None:
    """Show, retry or forget jobs that too many workers died of.

    A job whose workers die under it three times in a row, or four if they got some tokens of it, is given up, so that
    it does not take the fleet down.
    Its caller has got an error; the job is kept here for thirty days.
    """


def asking(function: Callable[..., Any]) -> Callable[..., Any]:
    """Whom to ask, and how to print."""
    for decorate in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        reaching(),
    ):
        function = decorate(function)
    return function


@command.command("list")
@asking
def show_all(target: Target, as_json: bool) -> None:
    """List them, the latest first. prompt: how many tokens. died: when it was given up, in UTC."""
    jobs = ask(target, lambda client: client.dead())
    if as_json:
        emit_json([in_short(job) for job in jobs])
    else:
        print_table(COLUMNS, [cells(job) for job in jobs], none="There are no dead jobs.")


@command.command("show")
@click.argument("request_id", metavar="ID")
@asking
def show_one(request_id: str, target: Target, as_json: bool) -> None:
    """Show all that is known of one, its payload too."""
    if not request_id:
        raise click.BadParameter("must name a dead job; `octavo dead list` lists them", param_hint="ID")
    jobs = ask(target, lambda client: client.dead(request_id))
    if not jobs:
        raise click.ClickException(f"there is no dead job {request_id!r}")
    (told,) = (as_dict(job) for job in jobs[:1])
    if as_json:
        emit_json(told)
        return
    for line in story(jobs[0]):
        emit(line)
    emit(json.dumps(told["payload"], indent=2))


@command.command("retry")
@click.argument("request_id", metavar="ID")
@asking
def retry(request_id: str, target: Target, as_json: bool) -> None:
    """Run one again, as a job of a new id that needs no caller."""
    new = ask(target, lambda client: client.retry_dead(request_id))
    if as_json:
        emit_json({"request_id": new})
    else:
        emit(f"runs again as {new}; `octavo attach {new}` shows its output")


@command.command("drop")
@click.argument("request_id", metavar="[ID]", default="")
@click.option("--all", "everything", is_flag=True, help="All of them.")
@asking
def drop(request_id: str, everything: bool, target: Target, as_json: bool) -> None:
    """Forget one of them, or all."""
    if everything == bool(request_id):
        raise click.UsageError("give either an ID or --all")
    dropped = ask(target, lambda client: client.drop_dead(request_id))
    if as_json:
        emit_json({"dropped": dropped})
    elif request_id and not dropped:
        raise click.ClickException(f"there is no dead job {request_id!r}")
    else:
        emit(f"dropped {dropped}")


def ask(target: Target, question: Callable[[Client], Awaitable[T]]) -> T:
    """Asks a gateway; its failure is the command's."""

    async def answer() -> T:
        async with Client(target) as client:
            return await question(client)

    try:
        return asyncio.run(answer())
    except grpc.aio.AioRpcError as error:
        raise click.ClickException(describe(error)) from error


def as_dict(job: fleet_pb2.Dead) -> dict[str, Any]:
    """For `--json`: the payload as JSON of its own, unless it is damaged."""
    told = plain(job)
    try:
        told["payload"] = json.loads(job.payload)
    except json.JSONDecodeError:
        told["payload"] = job.payload
    return told


def in_short(job: fleet_pb2.Dead) -> dict[str, Any]:
    """For `--json` of a list, which does not tell what they were asked."""
    return {name: value for name, value in plain(job).items() if name not in ("prompt_token_ids", "payload")}


def cells(job: fleet_pb2.Dead) -> tuple[Any, ...]:
    """A line of the table."""
    prompt, died = job.prompt_tokens, moment(job.died_unix_ms)
    return (job.request_id, job.model, job.worker, job.attempts, prompt, died, job.reason)


def story(job: fleet_pb2.Dead) -> list[str]:
    """What became of it, in lines for people."""
    return [
        f"{job.request_id}: {job.reason}",
        f"given up at {moment(job.died_unix_ms)} on worker {job.worker}, in attempt {job.attempts}",
        f"model {job.model}, {job.prompt_tokens} prompt tokens",
    ]


def moment(unix_ms: int) -> str:
    """In UTC, to the second, `2026-11-30 14:05:09`; what is no time, as it is."""
    try:
        return datetime.fromtimestamp(unix_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError):
        return f"{unix_ms} ms"  # no time of ours
