"""`octavo bench streams`: options and what is printed."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from bench.params import count
from kvstore.errors import KvError
from kvstore.ranges import Finite
from ops.child import ChildFailed
from ops.console import emit, emit_json, note, unless_interrupted
from ops.show import print_table


@click.command("streams")
@count("--streams", 500, "Open at once, on one gateway.", most=4000)
@count("--tokens", 40, "Of each stream.", least=4, most=10_000)
@count("--prompt-tokens", 32, "Of each stream.", least=8, most=4096)
@count("--workers", 10, "Without weights, to start.", most=200)
@click.option("--step-ms", type=Finite(min=1), default=500, show_default=True, help="Between tokens of a stream.")
@click.option("--pause-ms", type=Finite(min=0), default=100, show_default=True, help="Between two troubles.")
@click.option("--protocol", type=click.Choice(["grpc", "http"]), help="Default: both, in turn.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def streams(as_json: bool, protocol: str | None, **values: Any) -> None:
    """Measure what a gateway adds to each token of many streams, and whether others can touch them.

    From commit to arrival at the client, while all streams are open; the gateway's processor time and memory for them.
    First alone, then while bodies of 20 MB and malformed ones come and clients leave in the middle. Exit status 1 when
    any stream has other tokens than were committed, or than the same prompt brought before.
    """
    from bench.streams import PROTOCOLS, StreamsConfig, StreamsFailed, run_streams
    from bench.streams_figures import STREAM_COLUMNS, stream_cells

    config = StreamsConfig(protocols=(protocol,) if protocol else PROTOCOLS, **values)
    try:
        results = asyncio.run(unless_interrupted(run_streams(config, note)))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--workers") from error
    except (ChildFailed, KvError, StreamsFailed) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        emit_json(results)
        return
    print_table(STREAM_COLUMNS, [stream_cells(name, load) for name, load in results["loads"].items()])
    emit("")
    for name, load in results["loads"].items():
        if trouble := load.get("trouble"):
            emit(f"{name}: {sum(sum(each.values()) for each in trouble.values())} troubles, no stream touched")
