"""`octavo bench quality`: options and what is printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bench.kernels_command import KERNELS, DtypesParam
from bench.offline_command import CACHE, JSON, THREADS, cache_folder
from bench.output import results_folder, write_json
from bench.params import OUT, count, of_worker
from ops.console import emit, emit_json, note
from ops.show import print_table


@click.command("quality")
@of_worker("--model")
@click.option("--dtypes", type=DtypesParam(), default="bfloat16,int8", show_default=True, help="Beside float32.")
@of_worker("--kv-dtype", help="Of all but the float32 that they are compared with.")
@click.option(
    "--text",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A file of plain text. Default: one of our own, of 2,800 words.",
)
@count("--window", 512, "Tokens scored together.", least=2)
@count("--prompts", 128, "Cut from the text.")
@count("--prompt-tokens", 64, "Of each prompt.")
@count("--new", 8, "Greedy tokens of each prompt.")
@KERNELS
@THREADS
@CACHE
@OUT
@JSON
def quality(*, out: Path, as_json: bool, cache: Path | None, threads: int | None, **values: Any) -> None:
    """Measure what a dtype costs in likeness to float32.

    Perplexity of a text, cut into windows, and its ratio to float32's, with the ratio's standard error; how far
    log-probabilities of the text's tokens differ on average; and the share of prompts, cut from the text, after which
    the first and all new greedy tokens are float32's. Times are not measured: any machine will do.
    """
    results_folder(out)
    from bench.quality import QUALITY_COLUMNS, QualityConfig, quality_cells, run_quality
    from worker.model.errors import ModelError
    from worker.step import NotFinite

    config = QualityConfig(cache_dir=cache_folder(cache), threads=threads or 0, **values)
    try:
        results = run_quality(config, note)
    except (ModelError, NotFinite, ValueError) as error:
        raise click.ClickException(str(error)) from error
    write_json(results, out / "quality.json")
    note(f"wrote {out / 'quality.json'}")
    if as_json:
        emit_json(results)
        return
    print_table(QUALITY_COLUMNS, [quality_cells(found) for found in results["dtypes"]])
    text = results["text"]
    emit(f"{text['scored_tokens']} tokens scored, in {text['windows']} windows; {text['prompts']} prompts continued")
