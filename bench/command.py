"""`octavo bench`: throughput and latency of a fleet, as a table, JSON and a plot."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import grpc.aio

from bench.batch_command import batch
from bench.chaos.command import chaos
from bench.chaos.durability_command import durability
from bench.chaos.recovery_command import recovery
from bench.index_command import index
from bench.kernels_command import kernels
from bench.machine import describe_machine
from bench.offline_command import THREADS, engine, peers
from bench.output import results_folder, write_json, write_plot
from bench.pages_command import pages
from bench.params import OUT, PLOT, LengthsParam, LevelsParam, count
from bench.path_command import path
from bench.quality_command import quality
from bench.replay_command import replay
from bench.routing_command import routing
from bench.runner import measure, warm_up
from bench.streams_command import streams
from bench.workload import PROMPT_KINDS, Workload
from kvstore.errors import KvError
from ops.child import ChildFailed
from ops.client import Client, describe, plain
from ops.config import FleetConfig, fleet_config, fleet_options, usable_cores
from ops.console import Loading, emit, emit_json, note, unless_interrupted
from ops.fleet import Fleet
from ops.reach import Target, access_options
from ops.show import print_table

if TYPE_CHECKING:
    from gateway.access import Access
    from octavo.v1 import inference_pb2

WARM_UP_TOKENS = 8
REQUESTS_PER_PLACE = 4
FEWEST_REQUESTS = 8
COLUMNS = (
    *("concurrency", "requests", "errors", "output tok/s", "total tok/s"),
    *("TTFT p50", "p90", "p99", "per token p50", "p90", "p99", "whole p50", "p99"),
)


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """One run."""

    workload: Workload
    concurrency: tuple[int, ...]
    requests: int | None
    """Of each level; None: `REQUESTS_PER_PLACE` for each concurrent one, `FEWEST_REQUESTS` at least."""
    target: str
    """HOST:PORT of a gateway; empty: a fleet of its own, started and stopped with the run."""
    access: Access | None = None
    """How it is reached."""

    def requests_at(self, concurrency: int) -> int:
        return self.requests or max(FEWEST_REQUESTS, REQUESTS_PER_PLACE * concurrency)


@click.group("bench", invoke_without_command=True)
@click.option("--concurrency", type=LevelsParam(), default="1,8,32", show_default=True, help="Levels, one by one.")
@click.option("--requests", type=click.IntRange(min=1), help="Of each level. Default: 8, or 4 per place.")
@click.option("--prompt-tokens", type=LengthsParam(), default="32:512", show_default=True, help="Length of prompts.")
@click.option("--output-tokens", type=LengthsParam(), default="64", show_default=True, help="Length of answers.")
@click.option("--shared-prefix", type=click.IntRange(min=0), default=0, help="Tokens that all prompts begin with.")
@click.option("--prompts", type=click.Choice(PROMPT_KINDS), default="random", show_default=True, help="Of what.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed sends the same prompts.")
@click.option("--target", default="", help="HOST:PORT of a running gateway. Default: a fleet of its own.")
@access_options()
@OUT
@PLOT
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@fleet_options(workers=1, grpc_port=0)
@click.pass_context
def command(context: click.Context, /, out: Path, plot: str, as_json: bool, access: Access, **values: Any) -> None:
    """Measure throughput and latency, as JSON and a plot.

    Greedy requests that ignore the end of text, so that all do the same work every time; a warm-up that is not counted
    comes first. Time to first token and time per token are what this client saw.
    """
    if context.invoked_subcommand is not None:
        return
    fleet = fleet_config(values)
    workload = Workload(
        prompt_tokens=values["prompt_tokens"],
        output_tokens=values["output_tokens"],
        shared_prefix=values["shared_prefix"],
        kind=values["prompts"],
        seed=values["seed"],
        cache_salt=secrets.token_hex(8),
    )
    config = BenchConfig(workload, values["concurrency"], values["requests"], values["target"], access)
    results_folder(out, plot)
    try:
        results = asyncio.run(unless_interrupted(run(config, fleet)))
    except (ChildFailed, KvError) as error:
        raise click.ClickException(str(error)) from error
    except grpc.aio.AioRpcError as error:
        raise click.ClickException(describe(error)) from error
    write_json(results, out / "bench.json")
    note(f"wrote {out / 'bench.json'}")
    if as_json:
        emit_json(results)
    else:
        print_table(COLUMNS, [cells(level) for level in results["levels"]])
    if plot != "none":
        from bench.plot import draw

        write_plot(partial(draw, results["levels"], title_of(results)), out / f"bench.{plot}")
        note(f"wrote {out / f'bench.{plot}'}")


@command.command("core")
@click.option("--sequences", type=LevelsParam(4096), default="32,256", show_default=True, help="In a step, one by one.")
@count("--steps", 200, "Of each measurement.")
@count("--prompt-tokens", 128, "Of each sequence.")
@count("--vocabulary", 49152, "Width of the logits.", least=2)
@count("--requests", 400, "Of the mixed load.")
@THREADS
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A tokenizer.json. Default: that of the model prepared last, or made-up tokens.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed measures the same work.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def core(as_json: bool, threads: int | None, **values: Any) -> None:
    """Measure what a step costs beside the model, and how much K/V memory holds nothing.

    Scheduler, block pool, sampler and detokenizing of real code over logits made beforehand; times are per step, in
    milliseconds. Then requests of all lengths run through a pool, and what of its allocated memory is unused is told.
    """
    from bench.core import CORE_COLUMNS, CoreConfig, core_cells, run_core, told_waste

    try:
        results = run_core(CoreConfig(threads=threads or 0, **values), note)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        emit_json(results)
        return
    print_table(CORE_COLUMNS, [core_cells(level) for level in results["levels"]])
    emit(told_waste(results["waste"]))


@command.command("exact")
@click.option(
    "--rows", type=LevelsParam(8192), default="1,8,32,128,512", show_default=True, help="In a step, one by one."
)
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@count("--turns", 15, "Of each measurement.", least=2)
@count("--layers", 30, "With weights of their own.", most=200)
@THREADS
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def exact(as_json: bool, threads: int | None, **values: Any) -> None:
    """Measure what equal bits cost: row-exact products and fixed attention tiles against torch's own."""
    from bench.exact import EXACT_COLUMNS, ExactConfig, exact_cells, run_exact

    results = run_exact(ExactConfig(threads=threads or 0, **values), note)
    if as_json:
        emit_json(results)
        return
    print_table(EXACT_COLUMNS, [exact_cells(operation) for operation in results["operations"]])


command.add_command(batch)
command.add_command(chaos)
command.add_command(durability)
command.add_command(engine)
command.add_command(index)
command.add_command(kernels)
command.add_command(pages)
command.add_command(path)
command.add_command(peers)
command.add_command(quality)
command.add_command(recovery)
command.add_command(replay)
command.add_command(routing)
command.add_command(streams)


async def run(config: BenchConfig, settings: FleetConfig) -> dict[str, Any]:
    """Runs all levels and returns what goes into the file.

    Raises:
        grpc.aio.AioRpcError: the warm-up failed.
        ChildFailed: the fleet did not start.
    """
    machine = describe_machine()
    async with AsyncExitStack() as stack:
        target = config.target
        if not target:
            note(f"starting {settings.workers} worker(s) on {settings.model}")
            loading = Loading()
            fleet = await stack.enter_async_context(Fleet(settings, loading.sink, note, config.access))
            loading.over = True
            target = fleet.targets[0]
        client = await stack.enter_async_context(Client(Target(target, config.access)))
        model = await client.model()
        workers = await client.workers()
        levels = [await _level(client, config, model, index) for index in range(len(config.concurrency))]
    return {
        "machine": machine,
        "model": plain(model),
        "fleet": {
            "own": not config.target,
            "workers": [
                {"id": worker.id, "device": worker.device, "dtype": worker.dtype, "kv_tokens": worker.kv_tokens}
                for worker in workers
            ],
            "threads_per_worker": None if config.target else settings.threads_per_worker(usable_cores()),
        },
        "workload": {
            **asdict(config.workload),
            "prompt_tokens": str(config.workload.prompt_tokens),
            "output_tokens": str(config.workload.output_tokens),
        },
        "levels": levels,
    }


async def _level(client: Client, config: BenchConfig, model: inference_pb2.Model, index: int) -> dict[str, Any]:
    """One level with its warm-up. The warm-up's prompts are no measured one's, and of other levels' neither."""
    concurrency = config.concurrency[index]
    warm = config.workload.requests(concurrency, model.vocab_size, stream=-1 - index)
    for request in warm:
        request.stopping.max_tokens = WARM_UP_TOKENS
    await warm_up(client, warm)
    count = config.requests_at(concurrency)
    note(f"concurrency {concurrency}: {count} requests")
    level, samples = await measure(client, config.workload.requests(count, model.vocab_size, stream=index), concurrency)
    return {**level.as_dict(), "samples": [asdict(sample) for sample in samples]}


def title_of(results: dict[str, Any]) -> str:
    """What, on what, with what."""
    machine, model, workload = results["machine"], results["model"], results["workload"]
    workers = results["fleet"]["workers"]
    devices = ", ".join(sorted({worker["device"] for worker in workers}))
    return (
        f"{model['name']} {model['dtype']}, {len(workers)} worker(s) on {devices}\n"
        f"{machine['cpu']}, {machine['usable_cores']} cores; {machine['date'][:10]}\n"
        f"prompts of {workload['prompt_tokens']} tokens ({workload['shared_prefix']} shared), "
        f"answers of {workload['output_tokens']}"
    )


def cells(level: dict[str, Any]) -> tuple[Any, ...]:
    """A level's line of the table; times in milliseconds, whole answers in seconds."""

    def shown(name: str, rank: str, scale: float, unit: str) -> str:
        return "-" if level[name] is None else f"{level[name][rank] * scale:.{0 if scale > 1 else 1}f} {unit}"

    return (
        level["concurrency"],
        level["requests"],
        sum(level["errors"].values()),
        f"{level['output_tokens_per_s']:.1f}",
        f"{level['total_tokens_per_s']:.1f}",
        *(shown("first_token_s", rank, 1000, "ms") for rank in ("p50", "p90", "p99")),
        *(shown("seconds_per_token", rank, 1000, "ms") for rank in ("p50", "p90", "p99")),
        *(shown("total_s", rank, 1, "s") for rank in ("p50", "p99")),
    )
