"""`octavo bench kernels`: options and what is printed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from bench.offline_command import CACHE, JSON, THREADS, cache_folder
from bench.output import results_folder, write_json
from bench.params import OUT, LevelsParam, count, of_worker
from ops.console import emit, emit_json, note
from ops.show import print_table

if TYPE_CHECKING:
    from pathlib import Path

DTYPES = ("bfloat16", "float32", "int8")


class DtypesParam(click.ParamType[tuple[str, ...]]):
    """Comma-separated dtypes."""

    name = "dtype,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(dict.fromkeys(name.strip() for name in str(value).split(",")))
        for name in names:
            if name not in DTYPES:
                self.fail(f"{name!r} is not one of {', '.join(DTYPES)}", param, ctx)
        return names


KERNELS = of_worker("--kernels")


@click.command("kernels")
@of_worker("--model")
@click.option("--dtypes", type=DtypesParam(), default=",".join(DTYPES), show_default=True, help="One by one.")
@click.option("--sequences", type=LevelsParam(), default="1,8,32", show_default=True, help="That decode in a step.")
@click.option("--contexts", type=LevelsParam(), default="192,512", show_default=True, help="Tokens before theirs.")
@click.option("--prompts", type=LevelsParam(), default="128,512", show_default=True, help="Tokens of one, in a step.")
@click.option("--attention", type=LevelsParam(), default="64,512,4096", show_default=True, help="Tokens before others.")
@count("--turns", 15, "Of each measurement.")
@count("--read-mib", 512, "Read for the ceiling.")
@KERNELS
@THREADS
@CACHE
@OUT
@JSON
def kernels(*, out: Path, as_json: bool, cache: Path | None, threads: int | None, **values: Any) -> None:
    """Measure each part of a step of the fused decoder beside what this machine can do.

    Steps are run whole, as by a worker, and the kernels take their parts' times: medians are told. Bytes and operations
    come from the model's shape: what a part can't do without. The ceiling is the longer of two times: its bytes at the
    rate at which as many threads read memory on huge pages, and its operations at the best rate of products that our
    own kernels or torch reach on shapes that suit them: the best that was seen. A part whose numbers lie in a cache may
    be above it. See bench/kernels_work.py for what counts.
    """
    results_folder(out)
    from bench.kernels import KernelsConfig, run_kernels
    from bench.kernels_table import KERNELS_COLUMNS, in_table, kernels_cells, told
    from worker.model.errors import ModelError

    config = KernelsConfig(cache_dir=cache_folder(cache), threads=threads or 0, **values)
    try:
        results = run_kernels(config, note)
    except (ModelError, MemoryError) as error:
        raise click.ClickException(str(error)) from error
    write_json(results, out / "kernels.json")
    note(f"wrote {out / 'kernels.json'}")
    if as_json:
        emit_json(results)
        return
    print_table(KERNELS_COLUMNS, [kernels_cells(line) for line in results["lines"] if in_table(line)])
    for line in told(results):
        emit(line)
