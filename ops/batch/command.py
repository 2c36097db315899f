"""`octavo batch`: submit files of requests, look at them, cancel them, get their results."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import click

from kvstore.batches import IN_FLIGHT, Settings
from ops import ranges
from ops.batch.options import LINES, broker_options, folder_option, json_option, opened
from ops.batch.tidy import tidy
from ops.batch.worker import worker, workers
from ops.console import emit, emit_json, note
from ops.show import age, print_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvstore.batches import Batch, BatchStore

COLUMNS: Final = ("id", "state", "done", "failed", "lines", "tokens", "lines/s", "left", "name")
FOLLOW_S: Final = 0.5
"""Between two looks at a batch that is waited for."""


@click.group("batch")
def command() -> None:
    """Run files of requests in the background, behind whatever else the fleet does.

    A file has a request in each line, as OpenAI's batches have it (custom_id, method, url, body), or {"id": ...,
    "prompt": ...} with messages or token_ids instead of prompt, and max_tokens, temperature and so on beside it.
    `octavo batch worker` runs what is submitted.
    """


command.add_command(tidy)
command.add_command(worker)
command.add_command(workers)


def submit_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """How a batch is run."""
    for decorate in (
        click.argument("file", type=click.File("rb")),
        click.option("--model", default="", help="Of lines that name none. Default: the only one served."),
        click.option("--in-flight", type=LINES, default=IN_FLIGHT, show_default=True, help="Lines at once."),
        click.option("--priority", type=ranges.PRIORITY, default=-10, show_default=True, help="The higher goes first."),
        click.option(
            "--target", default="", help="HOST:PORT of gateways for it. Default: those that the worker knows."
        ),
        folder_option,
        broker_options,
        json_option,
    ):
        function = decorate(function)
    return function


@command.command("submit")
@submit_options
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Wait for its end; results go there.")
def submit(file: IO[bytes], out: Path | None, **values: Any) -> None:
    """Check a file of requests and accept it as a batch, whole or not at all.

    It prints the batch's id and ends; with --out it stays until the batch has ended. Leaving (Ctrl-C) ends no batch.
    """
    from gateway.batch.batches import Place, results

    batches, as_json = values["batches"], values["as_json"]
    with opened(values["redis"], values["namespace"]) as store:
        batch = accepted(Place(store, batches), file, file, values)
        if out is not None:
            note(f"accepted as {batch.id}; waiting for its end")
            batch = followed(store, batch.id)
            written(results(Place(store, batches), batch.id), out)
        show_one(batch, as_json=as_json)
        if out is not None and batch.state != "completed":
            raise click.ClickException(f"the batch is {batch.state}; {out} has the lines that were done")


@command.command("warm")
@submit_options
def warm(file: IO[bytes], **values: Any) -> None:
    """Compute the beginnings of prompts, so that workers have them in their caches.

    FILE has one in each line, as JSON: a system message as text, or {"system": ...}, {"prompt": ...}, {"messages": ...}
    or {"token_ids": ...}. They are sent with max_tokens 1, as a batch.
    """
    from gateway.batch.batches import Place
    from gateway.batch.warm import warming

    with opened(values["redis"], values["namespace"]) as store:
        show_one(accepted(Place(store, values["batches"]), file, warming(file), values), as_json=values["as_json"])


@command.command("list")
@broker_options
@json_option
def show_all(redis: str, namespace: str, as_json: bool) -> None:
    """List batches, the latest first; those that have ended for thirty days."""
    from gateway.batch.batches import every

    with opened(redis, namespace) as store:
        batches = every(store)
    if as_json:
        emit_json([each.as_dict() for each in batches])
    else:
        print_table(COLUMNS, [cells(each) for each in batches], none="There are no batches.")


@command.command("status")
@click.argument("batch_id", metavar="[ID]", default="")
@broker_options
@json_option
def status(batch_id: str, redis: str, namespace: str, as_json: bool) -> None:
    """Show how far a batch is; without an ID those that have not ended."""
    from gateway.batch import batches

    with opened(redis, namespace) as store:
        if batch_id:
            show_one(batches.status(store, batch_id), as_json=as_json)
            return
        found = [each for each in batches.every(store) if not each.state.ended]
    if as_json:
        emit_json([each.as_dict() for each in found])
    else:
        print_table(COLUMNS, [cells(each) for each in found], none="Every batch has ended.")


@command.command("results")
@click.argument("batch_id", metavar="ID")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="File. Default: stdout.")
@folder_option
@broker_options
def show_results(batch_id: str, out: Path | None, batches: Path, redis: str, namespace: str) -> None:
    """Print the lines that are done, in the order in which they were; of a batch that runs those until now."""
    from gateway.batch.batches import Place, results

    with opened(redis, namespace) as store:
        found = results(Place(store, batches), batch_id)
        if out is not None:
            written(found, out)
            return
        for raw in found:
            sys.stdout.buffer.write(raw)
        sys.stdout.buffer.flush()


@command.command("cancel")
@click.argument("batch_id", metavar="ID")
@broker_options
@json_option
def cancel(batch_id: str, redis: str, namespace: str, as_json: bool) -> None:
    """End a batch: what runs of it is cancelled, what is done is kept."""
    from gateway.batch import batches

    with opened(redis, namespace) as store:
        state = batches.cancel(store, batch_id)
    emit_json({"id": batch_id, "state": state}) if as_json else emit(f"{batch_id}: {state}")


@command.command("resume")
@click.argument("batch_id", metavar="ID")
@broker_options
@json_option
def resume(batch_id: str, redis: str, namespace: str, as_json: bool) -> None:
    """Go on with a batch that failed or was cancelled, with the lines that are not done."""
    from gateway.batch import batches

    with opened(redis, namespace) as store:
        state = batches.resume(store, batch_id)
    emit_json({"id": batch_id, "state": state}) if as_json else emit(f"{batch_id}: {state}")


def accepted(place: Any, file: IO[bytes], lines: Iterable[bytes], values: dict[str, Any]) -> Batch:
    """A new batch of these lines."""
    from gateway.batch.batches import submit as submitted

    settings = Settings(
        name=Path(str(getattr(file, "name", "-"))).name,
        model=values["model"],
        in_flight=values["in_flight"],
        priority=values["priority"],
        targets=values["target"],
    )
    return submitted(place, lines, settings)


def followed(store: BatchStore, batch_id: str) -> Batch:
    """A batch that has ended."""
    from gateway.batch import batches

    while not (batch := batches.status(store, batch_id)).state.ended:
        time.sleep(FOLLOW_S)
    return batch


def written(lines: Iterable[bytes], out: Path) -> None:
    """Writes a file, whole or not at all."""
    new = out.with_name(f".{out.name}.new")
    try:
        with new.open("wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        shutil.move(new, out)
    finally:
        new.unlink(missing_ok=True)


def show_one(batch: Batch, *, as_json: bool) -> None:
    """All that is known of one."""
    if as_json:
        emit_json(batch.as_dict())
        return
    print_table(COLUMNS, [cells(batch)])
    for line in (batch.progress.trouble and f"waits: {batch.progress.trouble}", batch.error):
        if line:
            emit(line)


def cells(batch: Batch) -> tuple[Any, ...]:
    """A line of the table. tokens: of answers. left: time, if it goes on as it did."""
    at = batch.progress
    left = "-" if batch.eta_s is None else age(int(batch.eta_s * 1000))
    rate = f"{at.lines_per_s:.1f}"
    settings = batch.settings
    return (
        batch.id,
        str(batch.state),
        at.done,
        at.failed,
        settings.total,
        at.completion_tokens,
        rate,
        left,
        settings.name,
    )
