"""`octavo bench routing`: options, defaults and what is written."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import click
import grpc.aio
from click.core import ParameterSource

from bench.output import results_folder, write_json, write_plot
from bench.params import OUT, PLOT, LengthsParam, NumbersParam, PoliciesParam
from bench.replay_records import write_records
from bench.routing import Results, RoutingConfig, run_routing
from bench.routing_load import GroupedLoad, scenarios
from bench.routing_report import COLUMNS, cells, markdown, title_of
from bench.routing_verdicts import NOTHING, nothing_answered
from kvstore.errors import KvError
from kvstore.ranges import Finite
from ops.child import ChildFailed
from ops.client import describe
from ops.config import FleetConfig, fleet_config, fleet_options
from ops.console import emit, emit_json, note, unless_interrupted
from ops.show import print_table

if TYPE_CHECKING:
    from pathlib import Path

REAL: Final[dict[str, Any]] = {
    "workers": 4,
    "kv_tokens": 4096,
    "threads": 1,
    "ratios": (2.0,),
    "loads": (0.4, 1.0, 3.0),
    "hot": False,
    "hit_free": False,
    "prefix_tokens": 512,
    "fill": 10.0,
    "warm": 4.0,
    "seconds": 30.0,
    "drain": 5.0,
}
SIMULATED: Final[dict[str, Any]] = {
    "workers": 32,
    "kv_tokens": 8192,
    "threads": 1,
    "model": "simulated:400,100",
    "ratios": (0.5, 1.0, 2.0, 4.0, 8.0),
    "loads": (3.0,),
    "hot": True,
    "hit_free": True,
    "prefix_tokens": 1024,
    "fill": 5.0,
    "warm": 5.0,
    "seconds": 14.0,
    "drain": 4.0,
}
"""What isn't given is taken from here, with the real model and with --simulated."""
OF_FLEET: Final = {
    "workers": f"Workers to start. Default: {REAL['workers']}; simulated {SIMULATED['workers']}.",
    "kv_tokens": f"Size of a worker's pool. Default: {REAL['kv_tokens']}; simulated {SIMULATED['kv_tokens']}.",
    "threads": f"Of each worker. Default: {REAL['threads']}.",
    "model": f"As of a worker. Default: {FleetConfig().model}; with --simulated {SIMULATED['model']}.",
}
"""What is told of options that other commands have, too."""


@click.command("routing")
@click.option("--simulated", is_flag=True, help="32 workers without weights; a sweep of working sets.")
@click.option(
    "--policies", type=PoliciesParam(), default=PoliciesParam.ALL, show_default=True, help="In turn, on each load."
)
@click.option("--ratios", type=NumbersParam(), help="Prefixes' tokens over a pool's. Default: 2; simulated 0.5 to 8.")
@click.option(
    "--loads", type=NumbersParam(), help="Arrivals over the rate without hits. Default: 0.4,1,3; simulated 3."
)
@click.option("--hot/--no-hot", default=None, help="One prefix for all, too. Default: if simulated.")
@click.option("--hit-free/--no-hit-free", default=None, help="No common prefixes, too. Default: if simulated.")
@click.option("--seconds", type=Finite(min=1), help="Of each run, that count. Default: 30; simulated 14.")
@click.option("--warm", type=Finite(min=0), help="Of each run, before that. Default: 4; simulated 5.")
@click.option("--fill", type=Finite(min=0), help="Before that, to fill caches. Default: 10; simulated 5.")
@click.option("--drain", type=Finite(min=0), help="Then, for what has begun. Default: 5; simulated 4.")
@click.option("--capacity", type=Finite(min=0, min_open=True), help="Load 1, in requests/s. Default: measured.")
@click.option("--routes", type=click.IntRange(min=1), help="Keep so many of each run's last decisions that count.")
@click.option("--prefix-tokens", type=click.IntRange(min=1), help="Of each group. Default: 512; simulated 1024.")
@click.option("--tail-tokens", type=LengthsParam(), default="32:96", show_default=True, help="Of a prompt's own.")
@click.option("--output-tokens", type=LengthsParam(), default="8", show_default=True, help="Length of answers.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed sends the same prompts.")
@OUT
@PLOT
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@fleet_options(workers=4, grpc_port=0)
@click.pass_context
def routing(context: click.Context, /, out: Path, plot: str, as_json: bool, **values: Any) -> None:
    """Compare the policies of gateways: hits, time to first token and throughput under equal loads.

    One fleet has a gateway for each policy. Prompts with long beginnings in common arrive by themselves (Poisson),
    whatever becomes of those before; each policy gets the same ones in turn. Without other options: 4 workers of one
    thread with small pools and three loads, or, with --simulated, 32 workers and working sets of half a pool to eight.
    Load 1 is what the fleet answers without hits: without --capacity that is measured first, for 20 s or more. A figure
    `> x` lies among the requests that were given up at a run's end, and is more. Writes routing.json, routing.md and
    the plot, with --routes also routes.jsonl for bench replay. Ctrl-C ends it with the figures so far.
    """
    settings, config = configured(context, values)
    results_folder(out, plot)
    results = Results({"command": called(context)})
    try:
        asyncio.run(unless_interrupted(run_routing(config, settings, results, note)))
    except (ChildFailed, KvError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    except grpc.aio.AioRpcError as error:
        raise click.ClickException(describe(error)) from error
    finally:
        if results.routes:
            write_records(results.routes, out / "routes.jsonl")
        if results.runs:
            told(results.as_dict(), out, plot, as_json=as_json)
    if nothing_answered(results.runs):
        raise click.ClickException(NOTHING)


# A fleet's own policy and gateways are none here: --policies has them all, with a gateway for each.
routing.params = [parameter for parameter in routing.params if parameter.name not in ("policy", "gateways")]
for _parameter in routing.params:
    if isinstance(_parameter, click.Option) and _parameter.name in OF_FLEET:
        # What a fleet takes elsewhere is not what it takes here.
        _parameter.help, _parameter.show_default = OF_FLEET[_parameter.name], False


def configured(context: click.Context, values: dict[str, Any]) -> tuple[FleetConfig, RoutingConfig]:
    """What to start and what to run: what was given, and for all else the defaults of the kind of fleet.

    Raises:
        click.BadParameter: prompts that a worker's pool has no room for.
    """
    defaults = SIMULATED if values.pop("simulated") else REAL
    for name, value in defaults.items():
        if values.get(name) is None or context.get_parameter_source(name) is ParameterSource.DEFAULT:
            values[name] = value
    settings = fleet_config(values)
    assert settings.kv_tokens is not None
    load = GroupedLoad(values["prefix_tokens"], values["tail_tokens"], values["output_tokens"], values["seed"])
    longest = load.prefix_tokens + load.tail_tokens.high + load.output_tokens.high
    if longest > settings.kv_tokens:
        raise click.BadParameter(f"a pool of {settings.kv_tokens} tokens has no room for {longest}", param_hint="sizes")
    loads = scenarios(
        values["ratios"],
        values["loads"],
        pool_tokens=settings.kv_tokens,
        prefix_tokens=load.prefix_tokens,
        hot=values["hot"],
        hit_free=values["hit_free"],
    )
    config = RoutingConfig(
        load=load,
        scenarios=tuple(loads),
        policies=values["policies"],
        fill_s=values["fill"],
        warm_s=values["warm"],
        seconds=values["seconds"],
        drain_s=values["drain"],
        capacity=values["capacity"],
        routes=values["routes"] or 0,
    )
    return settings, config


def called(context: click.Context) -> str:
    """The command with what was given to it, but for what is done with its results, and for a URL that may have a
    password."""
    words = ["octavo bench routing"]
    for parameter in context.command.params:
        name = parameter.name or ""
        given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if not given or name in ("out", "plot", "as_json", "redis"):
            continue
        value = context.params[name]
        if isinstance(value, bool):
            words.append(parameter.opts[0] if value else parameter.secondary_opts[0])
        else:
            parts = value if isinstance(value, tuple) else (value,)
            shown = ",".join(f"{part:g}" if isinstance(part, float) else str(part) for part in parts)
            words.append(f"{parameter.opts[0]} {shown}")
    return " ".join(words)


def told(results: dict[str, Any], out: Path, plot: str, *, as_json: bool) -> None:
    """Prints the figures and writes them into `out`."""
    if as_json:
        emit_json(results)
    else:
        print_table(COLUMNS, [cells(run) for run in results["runs"]])
        for sentence in results["told"]:
            emit(sentence)
    write_json(results, out / "routing.json")
    (out / "routing.md").write_text(markdown(results))
    note(f"wrote routing.json and routing.md into {out}")
    if plot != "none":
        from bench.routing_plot import draw_routing

        write_plot(lambda path: draw_routing(results, title_of(results), path), out / f"routing.{plot}")
        note(f"wrote {out / f'routing.{plot}'}")
