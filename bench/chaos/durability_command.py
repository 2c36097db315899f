"""`octavo bench durability`: options and what is printed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click
import grpc.aio

from bench.output import results_folder, write_json
from bench.params import LengthsParam
from bench.workload import Workload
from kvstore.errors import KvError
from ops.child import ChildFailed
from ops.client import describe
from ops.config import fleet_config, fleet_options
from ops.console import emit_json, note, unless_interrupted
from ops.show import print_table

_POSITIVE = click.IntRange(min=1)


@click.command("durability")
@click.option("--concurrency", type=_POSITIVE, default=16, show_default=True, help="Requests at a time.")
@click.option("--requests", type=_POSITIVE, default=64, show_default=True, help="Of each round.")
@click.option("--rounds", type=_POSITIVE, default=3, show_default=True, help="Of each way to write, in turn.")
@click.option("--prompt-tokens", type=LengthsParam(), default="32:128", show_default=True, help="Length of prompts.")
@click.option("--output-tokens", type=LengthsParam(), default="64", show_default=True, help="Length of answers.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed sends the same prompts.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default="bench-results/durability",
    show_default=True,
    help="Folder; the broker's data lie there, too.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@fleet_options(workers=1, grpc_port=0)
def durability(out: Path, as_json: bool, **values: Any) -> None:
    """Measure what it costs that accepted jobs outlive the broker's process, or its machine.

    The broker writes no append-only file (no), or one that is synced every second (everysec: a crash of the machine may
    cost the last second), or before each answer (always). The rest of the fleet stays the same, and rounds take turns.
    Bytes per token are what the file grows by, for each token of output.
    """
    from bench.chaos.durability import COLUMNS, DurabilityConfig, cells, run_durability

    results_folder(out)
    lengths = (values.pop("prompt_tokens"), values.pop("output_tokens"))
    config = DurabilityConfig(
        Workload(*lengths, seed=values.pop("seed")),
        **{name: values.pop(name) for name in ("concurrency", "requests", "rounds")},
    )
    settings = fleet_config(values)
    try:
        results = asyncio.run(unless_interrupted(run_durability(config, settings, out, note)))
    except (ChildFailed, KvError, FileNotFoundError, TimeoutError) as error:
        raise click.ClickException(str(error) or "the broker did not begin its file in time") from error
    except grpc.aio.AioRpcError as error:
        raise click.ClickException(describe(error)) from error
    write_json(results, out / "durability.json")
    if as_json:
        emit_json(results)
        return
    print_table(COLUMNS, [cells(row) for row in results["modes"]])


# The broker is the measurement's own.
durability.params = [parameter for parameter in durability.params if parameter.name != "redis"]
