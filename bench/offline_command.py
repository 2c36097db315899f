"""`octavo bench engine` and `octavo bench peers`: options and what is printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bench.offline import LOADS, BadAnswerError, Load
from bench.output import results_folder
from bench.params import OUT, PLOT, count, of_worker
from kvstore import ranges
from ops.console import INTERRUPTED, emit, emit_json, note
from ops.show import print_table
from worker.options import check_sizes


class LoadsParam(click.ParamType[tuple[Load, ...]]):
    """Comma-separated names of workloads."""

    name = ",".join(LOADS)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Load, ...]:
        if isinstance(value, tuple):
            return value
        names = [name.strip() for name in str(value).split(",")]
        for name in names:
            if name not in LOADS:
                self.fail(f"{name!r} is not one of {', '.join(LOADS)}", param, ctx)
        return tuple(load for name, load in LOADS.items() if name in names)


def cache_folder(given: Path | None) -> Path:
    """The cache that a worker takes: what is given, or the user's."""
    from worker.__main__ import default_cache

    return (given or default_cache()).expanduser()


CACHE = click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="OCTAVO_CACHE",
    show_envvar=True,
    help="Where converted models are kept. Default: the user's cache.",
)
LOADS_OPTION = click.option("--workload", "loads", type=LoadsParam(), default=",".join(LOADS), show_default=True)
SEED = click.option("--seed", type=int, default=0, show_default=True, help="The same seed measures the same prompts.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
THREADS = click.option("--threads", type=ranges.THREADS, help="Default: one per core.")


@click.command("engine")
@LOADS_OPTION
@count("--rounds", 5, "Medians are over these.")
@of_worker("--model")
@of_worker("--dtype")
@of_worker("--kv-dtype")
@of_worker("--kernels")
@of_worker("--kv-tokens")
@of_worker("--block-size")
@of_worker("--step-tokens")
@of_worker("--chunk-tokens")
@THREADS
@CACHE
@SEED
@JSON
def engine(
    *,
    loads: tuple[Load, ...],
    rounds: int,
    seed: int,
    cache: Path | None,
    threads: int | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Measure our engine on a real model in this process, without gateway and broker.

    A: 32 prompts of 128 tokens, 64 new each. B: 32 that share 512 tokens and have 32 of their own, 32 new each, no
    cache knowing them. D1, D8, D32: the rate of decoding so many sequences at once, after prompts of 128 tokens.
    Greedy, and the end of text is ignored. A round that is not counted comes first.
    """
    check_sizes(values["kv_tokens"], values["block_size"])
    from bench.engine import ENGINE_COLUMNS, EngineConfig, engine_cells, run_engine
    from worker.model.errors import ModelError
    from worker.params import AdmissionError

    config = EngineConfig(cache_dir=cache_folder(cache), threads=threads or 0, **values)
    try:
        results = run_engine(config, loads, rounds, seed, note)
    except (ModelError, BadAnswerError) as error:
        raise click.ClickException(str(error)) from error
    except AdmissionError as error:
        raise click.ClickException(f"{error}; give more --kv-tokens, or leave out workloads") from error
    if as_json:
        emit_json(results)
        return
    print_table(ENGINE_COLUMNS, [engine_cells(workload) for workload in results["workloads"]])


@click.command("peers")
@LOADS_OPTION
@click.option(
    "--peers",
    default="vllm,openvino,llama.cpp,llama.cpp-bench,transformers",
    show_default=True,
    help="NAME: in all its modes; NAME:MODE: in one. octavo:MODE are modes of ours.",
)
@click.option("--modes", default="", help="Those of peers without :MODE, int8 and int4 by width. Default: all.")
@click.option("--ours", default="bfloat16", show_default=True, help="Our modes. Ratios are to the first.")
@click.option(
    "--check",
    is_flag=True,
    help="Small workloads, one round, into OUT/check: does every engine run? Downloads them too.",
)
@count("--rounds", 3, "Medians are over these.")
@of_worker("--model")
@click.option("--turn-limit", type=ranges.Finite(min=1), default=600, show_default=True, help="Seconds, a workload.")
@OUT
@PLOT
@THREADS
@CACHE
@SEED
@JSON
def peers(peers: str, plot: str, as_json: bool, cache: Path | None, **values: Any) -> None:
    """Measure our engine and those of others in turn, on the same prompts.

    Each peer gets a virtual environment of its own, made from the package index once, which takes minutes and
    gigabytes in the cache. All are given the same bfloat16 weights and token ids, and make as many tokens; each in a
    process of its own, which is stopped while it is not its turn. A peer that can't be installed or fails is told
    with its reason. Ctrl-C ends it with the figures that there are. See `octavo bench engine` for the workloads.
    """
    from bench.peers import run
    from bench.peers.results import table, told
    from worker.model.errors import ModelError

    try:
        config = run.PeersConfig.of(names=peers, cache=cache_folder(cache), **values)
        results_folder(config.out, plot)
        results = run.run_peers(config, note)
    except (ModelError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    run.write(results, config.out, plot, note)
    if as_json:
        emit_json(results)
    else:
        columns, rows = table(results)
        print_table(columns, rows)
        for line in told(results):
            emit(line)
    if results["interrupted"]:
        raise SystemExit(INTERRUPTED)
