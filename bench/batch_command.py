"""`octavo bench batch`: options and what is printed."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any

import click
import grpc.aio

from bench.output import results_folder, write_json
from bench.params import OUT, LengthsParam
from bench.workload import Workload
from kvstore.batches import IN_FLIGHT
from kvstore.errors import KvError
from ops import ranges
from ops.batch.options import LINES
from ops.child import ChildFailed
from ops.client import describe
from ops.config import fleet_config, fleet_options
from ops.console import Loading, emit, emit_json, note, unless_interrupted
from ops.show import print_table

if TYPE_CHECKING:
    from pathlib import Path

_POSITIVE = click.IntRange(min=1)


@click.command("batch")
@click.option("--lines", type=_POSITIVE, default=1000, show_default=True, help="Of the batch.")
@click.option("--users", type=_POSITIVE, default=4, show_default=True, help="Who wait for answers, one each at a time.")
@click.option("--requests", type=_POSITIVE, default=100, show_default=True, help="Of theirs, with and without a batch.")
@click.option("--in-flight", type=LINES, default=IN_FLIGHT, show_default=True, help="Lines at once.")
@click.option("--priority", type=ranges.PRIORITY, default=-10, show_default=True, help="Of the batch.")
@click.option("--prompt-tokens", type=LengthsParam(), default="32:128", show_default=True, help="Length of prompts.")
@click.option("--output-tokens", type=LengthsParam(), default="16", show_default=True, help="Length of answers.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed sends the same prompts.")
@OUT
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@fleet_options(workers=1, grpc_port=0)
def batch(out: Path, as_json: bool, **values: Any) -> None:
    """Measure what a batch in the background costs those who wait for answers.

    Users ask a fleet of its own, each again when it has its answer: first alone, then beside a batch that a worker of
    batches runs. Then that worker is killed, and another one ends the batch: no line may be lost or doubled.
    """
    from bench.batch import COLUMNS, BatchBench, run_batch, verdict

    settings = fleet_config(values)
    workload = Workload(
        prompt_tokens=values.pop("prompt_tokens"),
        output_tokens=values.pop("output_tokens"),
        seed=values.pop("seed"),
        cache_salt=secrets.token_hex(8),
    )
    results_folder(out)
    loading = Loading()
    try:
        work = run_batch(BatchBench(workload, **values), settings, loading.sink, note)
        results = asyncio.run(unless_interrupted(work))
    except (ChildFailed, KvError, TimeoutError) as error:
        raise click.ClickException(str(error) or "the batch did not end in time") from error
    except grpc.aio.AioRpcError as error:
        raise click.ClickException(describe(error)) from error
    write_json(results, out / "batch.json")
    note(f"wrote {out / 'batch.json'}")
    if as_json:
        emit_json(results)
    else:
        print_table(COLUMNS, results["cells"])
        emit(verdict(results))
