"""`octavo ledger`: what became of all requests that were ever accepted, and whether that is all of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click
import grpc.aio

from kvstore.errors import KvError
from kvstore.jobs import Jobs
from ops import show
from ops.answer import plain
from ops.client import Client, describe
from ops.console import emit_json
from ops.show import print_table, source_options

if TYPE_CHECKING:
    from octavo.v1 import fleet_pb2
    from ops.reach import Target

ENDS = ("finished", "failed", "cancelled", "expired", "dead")
"""What a job may have come to."""


@click.command("ledger")
@source_options
def command(target: Target, redis: str, namespace: str, as_json: bool) -> None:
    """Show what became of all requests that were ever accepted, and whether that is all of them.

    finished: answered. failed: with an error. cancelled: by Cancel, or because the caller left. expired: by their
    deadline. dead: too many workers died while they ran them; see octavo dead. in flight: counted in the workers'
    queues, and so no sum of the others.

    Exit status 1 when it does not add up: then something was lost, or counted twice.
    """
    try:
        found = asyncio.run(from_redis(redis, namespace) if redis else ask(target))
    except grpc.aio.AioRpcError as error:
        raise click.ClickException(describe(error)) from error
    except KvError as error:
        raise click.ClickException(str(error)) from error
    missing = missing_of(found)
    if as_json:
        emit_json({**plain(found), "missing": missing})
    else:
        rows = ("accepted", *ENDS, "in_flight")
        print_table(("requests", "count"), [(name.replace("_", " "), getattr(found, name)) for name in rows])
    if missing:
        counted = found.accepted - missing
        raise click.ClickException(f"{found.accepted} were accepted, and {counted} are accounted for")


async def ask(target: Target | str) -> fleet_pb2.LedgerResponse:
    """Raises AioRpcError."""
    async with Client(target) as client:
        return await client.ledger()


async def from_redis(url: str, namespace: str) -> fleet_pb2.LedgerResponse:
    """The same, without a gateway. Raises KvError."""
    from gateway.fleet import ledger_message

    return ledger_message(await show.from_redis(url, namespace, lambda broker: Jobs(broker).ledger()))


def missing_of(found: fleet_pb2.LedgerResponse) -> int:
    """How many jobs were accepted and are nowhere; below zero: how many were counted that never were accepted."""
    return int(found.accepted - found.in_flight - sum(getattr(found, name) for name in ENDS))
