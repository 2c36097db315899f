"""`octavo explain`: why a job went where it went, and what it found there."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import click
import grpc.aio

from kvstore.errors import KvError
from kvstore.jobs import Jobs
from ops import show
from ops.answer import plain
from ops.client import Client, describe
from ops.console import emit, emit_json
from ops.show import print_table, source_options

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from octavo.v1 import fleet_pb2
    from ops.reach import Target

COLUMNS = (
    *("worker", "held", "stored", "jobs", "waiting", "wait", "prefill", "fetch", "decode", "cost", "verdict"),
    *("prefill/s", "step", "sequence"),
)


@click.command("explain")
@click.argument("request_id", metavar="ID")
@source_options
def command(request_id: str, target: Target, redis: str, namespace: str, as_json: bool) -> None:
    """Show why a job went where it went: every worker that was considered, and what the job found in its cache.

    ID is the request's. A job is kept for ten minutes after its end; of decisions, the last thousands of the fleet.

    held, stored: prompt tokens in the worker's cache, and more that the page store had. jobs, waiting: what the worker
    was charged with, the latter in prompt tokens. The costs are in seconds: until the job's turn comes, for its prompt,
    for pages, and for decoding, its own and by how much it slows down others. prefill/s (prompt tokens a second), step,
    sequence: the rates that these were reckoned with.
    """
    found = fetch(from_redis(redis, namespace, request_id) if redis else from_gateway(target, request_id))
    if as_json:
        emit_json(plain(found))
        return
    for line in story(found):
        emit(line)
    if found.HasField("route"):
        emit("")
        print_table(COLUMNS, [cells(each) for each in found.route.candidates])


def fetch(question: Coroutine[Any, Any, fleet_pb2.ExplainResponse | None]) -> fleet_pb2.ExplainResponse:
    """Runs a query; its failure is the command's."""
    try:
        found = asyncio.run(question)
    except grpc.aio.AioRpcError as error:
        raise click.ClickException(describe(error)) from error
    except KvError as error:
        raise click.ClickException(str(error)) from error
    if found is None:
        raise click.ClickException(
            "the job is unknown, or ended too long ago; what is known of it is kept for ten minutes after its end"
        )
    return found


async def from_gateway(target: Target | str, request_id: str) -> fleet_pb2.ExplainResponse:
    """Raises AioRpcError."""
    async with Client(target) as client:
        return await client.explain(request_id)


async def from_redis(url: str, namespace: str, request_id: str) -> fleet_pb2.ExplainResponse | None:
    """The same, without a gateway; None: unknown. Raises KvError."""
    from gateway.fleet import explanation

    return await show.from_redis(url, namespace, lambda broker: explanation(Jobs(broker), request_id))


def story(found: fleet_pb2.ExplainResponse) -> list[str]:
    """What became of the job, in lines for people."""
    where = f"on worker {found.worker}"
    if found.stolen_from:
        where += f", which took it from {found.stolen_from}"
    lines = [f"{found.state} {where}; attempt {found.attempt}"]
    route = found.route
    if not found.HasField("route"):
        lines.append("its decision is not kept: it came without one, or many came later")
    else:
        chosen = route.candidates[route.chosen]
        lines.append(f"sent to {chosen.worker} by policy {route.policy}; prefix index {route.index}")
        expected = f"{route.predicted_cached_tokens} of {route.prompt_tokens} prompt tokens cached"
        lines.append(f"expected: {expected}, {route.answer_tokens} tokens of answer")
    if found.stolen_from:
        expected = f"{found.predicted_cached_tokens} of {found.prompt_tokens} prompt tokens cached"
        lines.append(f"expected by {found.worker}: {expected}")
    if found.started:
        fetched = f", {found.fetched_tokens} of them from the page store" if found.fetched_tokens else ""
        lines.append(f"found: {found.cached_tokens} of {found.prompt_tokens} prompt tokens cached{fetched}")
    else:
        lines.append("found: not known before its first token")
    return lines


def cells(each: fleet_pb2.Candidate) -> tuple[Any, ...]:
    """A candidate's line."""
    return (
        each.worker,
        each.held_tokens,
        each.stored_tokens,
        each.jobs,
        each.prefill_tokens,
        *(f"{seconds:.3f}" for seconds in (each.wait_s, each.prefill_s, each.fetch_s, each.decode_s)),
        f"{each.wait_s + each.prefill_s + each.fetch_s + each.decode_s:.3f}",
        each.verdict,
        f"{each.prefill_tokens_per_s:.0f}",
        f"{each.step_ms:.2f} ms",
        f"{each.sequence_ms:.2f} ms",
    )
