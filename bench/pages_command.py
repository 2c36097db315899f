"""`octavo bench pages`: options and what is printed."""

from __future__ import annotations

import asyncio
from typing import Any

import click
import grpc.aio

from bench.params import LevelsParam
from kvstore.errors import KvError
from ops.child import ChildFailed
from ops.client import BrokenStream, describe
from ops.config import fleet_config, fleet_options
from ops.console import emit_json, note, unless_interrupted
from ops.show import print_table
from worker.model.errors import ModelError

MADE_HERE = ("workers", "gateways", "policy", "steal", "kv_tokens", "pages")
"""Of a fleet's options those that would do nothing: one worker and one gateway are measured, with a pool and a store of
the measurement's own."""


@click.command("pages")
@click.option("--lengths", type=LevelsParam(), default="128,512,1500", show_default=True, help="Of prompts, in tokens.")
@click.option("--turns", type=click.IntRange(min=1), default=10, show_default=True, help="Prompts of either kind.")
@click.option("--store", "store", type=click.Choice(["redis", "dir", "both"]), default="both", show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed sends the same prompts.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@fleet_options(workers=1, grpc_port=0)
def pages(as_json: bool, lengths: tuple[int, ...], turns: int, store: str, seed: int, **values: Any) -> None:
    """Measure the first token after a prefix that is fetched from a store of pages, beside one that is computed.

    A worker whose pool holds one prompt gets new prompts and, in between, one that each of them pushes out. "Pays from"
    is the break-even line that the worker has measured: shorter prefixes are computed. "Equal" says that what was
    fetched gave the same answer as the cold run. A dash: nothing was fetched. One worker and one gateway are measured,
    with a pool and a store of their own: there are no options for these.
    """
    from bench.pages import ANSWER_TOKENS, COLUMNS, STORES, PagesBench, cells, context_of, run_pages

    config = PagesBench(lengths, turns, STORES if store == "both" else (store,), seed)
    if values["pages_redis"] and store == "dir":
        raise click.BadParameter("pages go to a folder with --store dir", param_hint="--pages-redis")
    settings = fleet_config(values)
    try:
        most = context_of(settings, note) - ANSWER_TOKENS
        if max(lengths) > most:
            reason = f"prompts of {max(lengths)} tokens are longer than the {most} that {settings.model} has room for"
            raise click.BadParameter(reason, param_hint="--lengths")
        results = asyncio.run(unless_interrupted(run_pages(config, settings, note)))
    except (ChildFailed, KvError, BrokenStream, TimeoutError, ModelError) as error:
        raise click.ClickException(str(error)) from error
    except grpc.aio.AioRpcError as error:
        raise click.ClickException(describe(error)) from error
    if as_json:
        emit_json(results)
        return
    print_table(COLUMNS, [cells(row) for row in results["lengths"]])


pages.params = [parameter for parameter in pages.params if parameter.name not in MADE_HERE]
