"""`octavo tune`: options and what is printed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from bench.offline_command import CACHE, JSON, SEED, THREADS, cache_folder
from bench.output import results_folder, write_json, write_plot
from bench.params import OUT, PLOT, LevelsParam, count, of_worker
from kvstore.ranges import Finite
from ops.console import INTERRUPTED, emit, emit_json, note
from ops.show import print_table
from worker.options import SHARED

RUNS: Final = LevelsParam(SHARED["--block-run"]["type"].max)
MOST_TOKENS: Final[int] = SHARED["--block-size"]["type"].max
"""Of a block, as for a worker."""


class BlockSizesParam(LevelsParam):
    """Sizes that the fused decoder and a worker take."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        sizes = super().convert(value, param, ctx)
        for size in sizes:
            if size % 16:
                self.fail(f"{size} is no multiple of 16; the fused decoder needs blocks that are", param, ctx)
            if size & (size - 1) or size > MOST_TOKENS:
                self.fail(f"{size} is no power of two up to {MOST_TOKENS}, which a worker needs", param, ctx)
        return sizes


@click.command("tune")
@click.option("--block-sizes", type=BlockSizesParam(), default="16,32,64,128", show_default=True, help="In tokens.")
@click.option(
    "--block-runs",
    type=RUNS,
    default="4,16",
    show_default=True,
    help="In blocks, beside 1.",
)
@click.option("--contexts", type=LevelsParam(), default="64,512,4096", show_default=True, help="In tokens.")
@click.option("--sequences", type=LevelsParam(), default="1,8,32", show_default=True, help="In a step.")
@count("--rounds", 5, "Medians are over these.")
@count("--steps", 2, "Of each in each round.")
@count("--requests", 150, "Of the mixed load.")
@click.option(
    "--most-unused",
    type=Finite(0, 1),
    default=0.04,
    show_default=True,
    help="Share of the allocated slots that may hold nothing.",
)
@of_worker("--model")
@of_worker("--dtype")
@of_worker("--kernels")
@of_worker("--kv-tokens", type=click.IntRange(min=1024))
@OUT
@PLOT
@THREADS
@CACHE
@SEED
@JSON
def command(*, out: Path, plot: str, cache: Path | None, threads: int | None, as_json: bool, **values: Any) -> None:
    """Find the size of blocks, and the length of runs of neighbouring ones, for this machine.

    Times steps of the real decoder, whose keys and values lie as a pool leaves them: fresh, worn by texts that came and
    went, and in pieces on purpose. Tells what of the K/V memory each size leaves unused in a mixed load, and proposes a
    setting for workers. Takes two to three minutes with the default model on two cores. Ctrl-C ends it with the rounds
    that were done.
    """
    results_folder(out, plot)
    from bench.tune import TuneConfig, run_tune
    from bench.tune_model import load
    from worker.model.errors import ModelError

    config = TuneConfig(cache_dir=cache_folder(cache), threads=threads or 0, **values)
    try:
        subject = load(
            config.model,
            dtype=config.dtype,
            kernels=config.kernels,
            threads=config.threads,
            kv_tokens=config.kv_tokens,
            cache_dir=config.cache_dir,
            note=note,
        )
        results = run_tune(config, subject, note, lambda so_far: write_json(so_far, out / "tune.json"))
    except (ModelError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    note(f"wrote {out / 'tune.json'}")
    draw(results, out, plot)
    if as_json:
        emit_json(results)
    else:
        print_table(*table(results))
        emit(told(results))
    if results["interrupted"]:
        raise SystemExit(INTERRUPTED)


def told(results: dict[str, Any]) -> str:
    """The proposal in a sentence."""
    proposal = results["proposal"]
    after = f" (after {results['rounds']} of {results['config']['rounds']} rounds)" if results["interrupted"] else ""
    setting = f"--block-size {proposal['block_size']} --block-run {proposal['block_run']}"
    return f"proposed{after}: {setting}. {proposal['reason']}"


def draw(results: dict[str, Any], out: Path, plot: str) -> None:
    """The plot in `out`, if one is wanted; matplotlib is imported here and not before."""
    if plot == "none":
        return
    from bench.tune_plot import draw_tune

    write_plot(partial(draw_tune, results, title_of(results)), out / f"tune.{plot}")
    note(f"wrote {out / f'tune.{plot}'}")


def title_of(results: dict[str, Any]) -> str:
    """What, on what."""
    machine, config = results["machine"], results["config"]
    return (
        f"{Path(config['model']).name} {results['dtype']}, kernels for {results['kernels']} on {results['threads']} "
        f"threads; {machine['cpu']}; {machine['date'][:10]}"
    )


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Columns and lines: medians in milliseconds, and the ratio to the smallest blocks without runs."""
    steps = [f"{step['sequences']} x {step['context']}" for step in results["variants"][0]["steps"]]
    rows = [
        [
            str(each["block_size"]),
            str(each["block_run"]),
            each["state"],
            "-" if each["neighbours"] is None else f"{each['neighbours']:.0%}",
            *(f"{step['median_ms']:.2f}" for step in each["steps"]),
            f"{each['ratio']:.3f}",
            f"{each['unused']:.1%}",
        ]
        for each in results["variants"]
    ]
    return ["block", "run", "pool", "neighbours", *steps, "ratio", "unused"], rows
