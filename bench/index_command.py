"""`octavo bench index`: options and what is printed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from kvstore.errors import KvError
from ops.console import emit, emit_json, note, unless_interrupted
from ops.show import print_table


@click.command("index")
@click.option("--workers", type=click.IntRange(min=1), default=100, show_default=True, help="That a job may go to.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=8192, show_default=True, help="Of each job.")
@click.option("--block-size", type=click.IntRange(min=1), default=16, show_default=True, help="Tokens per block.")
@click.option("--held", type=click.IntRange(min=0), default=2048, show_default=True, help="Blocks held besides.")
@click.option("--calls", type=click.IntRange(min=1), default=500, show_default=True, help="Of each part.")
@click.option("--chunks", type=click.IntRange(min=1), default=32, show_default=True, help="Tokens of a step.")
@click.option("--steps", type=click.IntRange(min=1), default=1000, show_default=True, help="That are committed.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed measures the same work.")
@click.option(
    "--server",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A redis-server or valkey-server. Default: the packaged one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def index(as_json: bool, **values: Any) -> None:
    """Measure what routing by prefix and committing cost, in the broker and at its client.

    A broker is started, in which workers hold parts of a long prompt. Then jobs are matched and submitted, and steps
    committed, one after the other. Times are those of one call: in scripts and of the server's processor by its own
    account, and as the client waited. The aims are for the load that is the default.
    """
    from bench.index import IndexConfig, run_index
    from bench.index_figures import INDEX_COLUMNS, index_cells, told_aims

    config = IndexConfig(**values)
    if not config.blocks:
        raise click.UsageError("--prompt-tokens is less than a block")
    try:
        results = asyncio.run(unless_interrupted(run_index(config, note)))
    except (FileNotFoundError, KvError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        emit_json(results)
        return
    print_table(INDEX_COLUMNS, [index_cells(told) for told in results["parts"]])
    emit("")
    emit(told_aims(results))
