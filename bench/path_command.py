"""`octavo bench path`: options and what is printed."""

from __future__ import annotations

import asyncio
from typing import Any

import click
import grpc.aio

from bench.offline import BadAnswerError
from kvstore.errors import KvError
from ops.child import ChildFailed
from ops.client import BrokenStream, describe
from ops.config import fleet_config, fleet_options
from ops.console import emit, emit_json, note, unless_interrupted
from ops.show import print_table


@click.command("path")
@click.option("--requests", type=click.IntRange(min=1), default=20, show_default=True, help="One after the other.")
@click.option("--streams", type=click.IntRange(min=1), default=32, show_default=True, help="At once.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Of so many streams.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="About; of text.")
@click.option("--output-tokens", type=click.IntRange(min=2), default=64, show_default=True, help="Of each stream.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed sends the same prompts.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@fleet_options(workers=1, grpc_port=0)
def path(as_json: bool, **values: Any) -> None:
    """Measure where a token's time goes, from the client to the model and back.

    A gateway and a worker are started; the same engine runs in this process. Both answer the same requests in turn: one
    after the other, for the first token, and many at once, for the time per token. Parts are what the processes tell in
    their metrics, medians over requests or rounds. The table of streams has parts that overlap; that of the first token
    adds up, medians aside.
    """
    settings = fleet_config(values)
    if (settings.workers, settings.gateways) != (1, 1):
        raise click.UsageError("what is measured is one gateway and one worker")
    from bench.path import PathConfig, run_path
    from bench.path_figures import (
        CPU_COLUMNS,
        FIRST_COLUMNS,
        STREAM_COLUMNS,
        cpu_rows,
        first_rows,
        stream_rows,
        told_aims,
    )
    from worker.model.errors import ModelError

    config = PathConfig(**values)
    try:
        results = asyncio.run(unless_interrupted(run_path(config, settings, note)))
    except (BadAnswerError, BrokenStream, ChildFailed, KvError, ModelError) as error:
        raise click.ClickException(str(error)) from error
    except grpc.aio.AioRpcError as error:
        raise click.ClickException(describe(error)) from error
    if as_json:
        emit_json(results)
        return
    first, streams = results["first_token"], results["streams"]
    print_table(FIRST_COLUMNS, first_rows(first))
    emit("")
    print_table((f"{streams['concurrency']} streams", *STREAM_COLUMNS[1:]), stream_rows(streams))
    emit("")
    print_table(CPU_COLUMNS, cpu_rows(streams))
    emit("")
    emit(told_aims(first, streams))
