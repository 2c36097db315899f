"""`octavo queue` and `octavo workers`: what the fleet is doing, from a gateway or straight from Redis."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any, TypeVar

import click
import grpc.aio
from rich.console import Console
from rich.table import Table

from kvstore.client import BrokerConfig, connect
from kvstore.errors import KvError
from kvstore.jobs import Jobs
from kvstore.registry import Registry
from ops.answer import plain
from ops.client import Client, describe
from ops.config import option
from ops.console import emit, emit_json
from ops.reach import reaching

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from kvstore.client import Broker
    from ops.reach import Target

T = TypeVar("T")

UNCUT = 10_000
"""Columns of a line in a file or pipe."""
Row = dict[str, Any]
WORKER_COLUMNS = (
    *("worker", "state", "model", "device", "running", "waiting"),
    *("free", "cached", "used", "prefill/s", "index", "heartbeat", "metrics"),
)


def source_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Where to ask, and how to print."""
    for decorate in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        option("--namespace", default="default", help="With --redis: the fleet's name within it."),
        click.option("--redis", default="", help="Ask Redis itself at this URL: works without any gateway."),
        reaching(),
    ):
        function = decorate(function)
    return function


@click.command("queue")
@source_options
def queue(target: Target, redis: str, namespace: str, as_json: bool) -> None:
    """Show, for each worker, how many jobs wait, how many run, and how old the oldest is.

    undelivered: accepted, not yet taken by the worker. pending: taken, not ended.
    """
    rows = fetch(queues_from_redis(redis, namespace) if redis else queues_from_gateway(target))
    if as_json:
        emit_json(rows)
        return
    columns = ("worker", "undelivered", "pending", "oldest")
    told = [(r["worker"], r["undelivered"], r["pending"], age(r["oldest_age_ms"])) for r in rows]
    print_table(columns, told, none="There are no queues: no worker is alive, and none has left any jobs.")


@click.command("workers")
@source_options
def workers(target: Target, redis: str, namespace: str, as_json: bool) -> None:
    """Show the live workers and what they were doing at their last heartbeat.

    free, cached, used: blocks of the worker's pool by state. prefill/s: prompt tokens that it computes in a second, by
    its own measure. index: whether the prefix index shows what it has cached (exact), or is being repaired (degraded).
    """
    rows = fetch(workers_from_redis(redis, namespace) if redis else workers_from_gateway(target))
    if as_json:
        emit_json(rows)
        return
    none = "No worker is alive; octavo worker starts one."
    print_table(WORKER_COLUMNS, [worker_cells(row) for row in rows], none=none)


def worker_cells(row: Row) -> tuple[Any, ...]:
    """A worker's line; free, cached and used count blocks; prefill/s is tokens of prompts."""
    return (
        row["id"],
        row["state"],
        row["model"],
        f"{row['device']} {row['dtype']}",
        row["running"],
        row["waiting"],
        row["blocks_free"],
        row["blocks_cached"],
        row["blocks_used"],
        f"{row['prefill_tokens_per_s']:.0f}",
        row["index"] or "-",
        age(row["heartbeat_age_ms"]),
        row["metrics"],
    )


def fetch(rows: Coroutine[Any, Any, list[Row]]) -> list[Row]:
    """Runs a query; its failure is the command's."""
    try:
        return asyncio.run(rows)
    except grpc.aio.AioRpcError as error:
        raise click.ClickException(describe(error)) from error
    except KvError as error:
        raise click.ClickException(str(error)) from error


async def queues_from_gateway(target: Target | str) -> list[Row]:
    """Rows of octavo.v1.Queue, by worker."""
    async with Client(target) as client:
        return [plain(queue) for queue in await client.queues()]


async def workers_from_gateway(target: Target | str) -> list[Row]:
    """Rows of octavo.v1.Worker, by id."""
    async with Client(target) as client:
        return [plain(worker) for worker in await client.workers()]


async def queues_from_redis(url: str, namespace: str) -> list[Row]:
    """The same rows, without a gateway."""
    from gateway.fleet import queue_message

    queues = await from_redis(url, namespace, lambda broker: Jobs(broker).queues())
    return [plain(queue_message(each)) for each in queues]


async def workers_from_redis(url: str, namespace: str) -> list[Row]:
    """The same rows, without a gateway."""
    from gateway.fleet import worker_message

    workers = await from_redis(url, namespace, lambda broker: Registry(broker).workers())
    return [plain(worker_message(each)) for each in workers]


async def from_redis(url: str, namespace: str, query: Callable[[Broker], Awaitable[T]]) -> T:
    """What `query` finds."""
    broker = await connect(BrokerConfig(url=url, namespace=namespace))
    try:
        return await query(broker)
    finally:
        await broker.close()


def age(milliseconds: int) -> str:
    """A duration for people: `0`, `350 ms`, `2.5 s`, `3 min 20 s`."""
    if milliseconds < 1000:
        return f"{milliseconds} ms" if milliseconds else "0"
    seconds = milliseconds / 1000
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, none: str = "") -> None:
    """A table on stdout; the first column names the rows, numbers go to the right. Without rows it is `none`, a
    sentence, where there is one."""
    if none and not rows:
        emit(none)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        numeric = index > 0 and bool(rows) and all(str(row[index])[:1] in "0123456789-" for row in rows)
        table.add_column(name, justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    # A pipe has no width: rich would take 80 columns and cut cells.
    Console(width=None if sys.stdout.isatty() else UNCUT).print(table)
