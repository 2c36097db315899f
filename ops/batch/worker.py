"""`octavo batch worker` and `octavo batch workers`: who runs batches."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import socket
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from kvstore.batches import IN_FLIGHT
from ops.batch.chores import Chore, Chores
from ops.batch.options import LINES, broker_options, folder_option, json_option, opened
from ops.config import DEFAULT_TARGET, option
from ops.console import emit_json
from ops.reach import access_options
from ops.show import age, print_table

if TYPE_CHECKING:
    from pathlib import Path

    from gateway.access import Access

ALIVE_S: Final = 10.0
"""A worker whose last heartbeat is older is not well."""
COLUMNS: Final = ("name", "state", "batch", "heartbeat")


@click.command("worker")
@option("--target", default=DEFAULT_TARGET, help="HOST:PORT of gateways, with commas between them.")
@option("--in-flight", type=LINES, default=IN_FLIGHT, help="Lines at once, of batches that came by HTTP.")
@option("--warm", type=click.Path(dir_okay=False), default="", help="Beginnings of prompts to compute now and again.")
@option("--warm-every", type=click.IntRange(1), default=3600, help="Seconds between two times.")
@option("--tidy-every", type=click.IntRange(0), default=3600, help="Seconds between two clean-ups; 0: none.")
@folder_option
@broker_options
@access_options()
def worker(
    target: str, in_flight: int, batches: Path, redis: str, namespace: str, access: Access, **schedule: Any
) -> None:
    """Run batches, one after the other, until SIGTERM or Ctrl-C: what runs then is left, and goes on at another worker
    or after the next start. Several may run, on several machines.

    --warm names a file as `octavo batch warm` takes it, which is submitted at the start and then every so often. Every
    hour `octavo batch tidy` throws away what is too old; its settings are its OCTAVO_* variables. Of several workers
    one does it each time. Where gateways want API keys, its own must be an operator's: lines of a batch that came by
    HTTP run as its tenant's. Others are of the key's own tenant.
    """
    from gateway.batch.job import JobConfig
    from kvstore.batch_worker import BatchWorker

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    batches.mkdir(parents=True, exist_ok=True)
    # rq hands a job to a process of its own, which has nothing but this.
    # `access` has refused what can't be; the files that it was made of are read anew for each batch.
    told = click.get_current_context().params
    reached = {name: told[name] for name in ("tls_ca", "client_cert", "client_key", "api_key")}
    config = JobConfig(redis, namespace, target, batches.resolve(), in_flight, **reached)
    os.environ.update(config.as_environment())
    with opened(redis, namespace) as store, store.translated():
        chores = Chores(store, scheduled(**schedule))
        runner = BatchWorker(store, worker_name(), chores.look)
        sys.stdout.write(f"ready {json.dumps({'worker': runner.name, 'queue': store.keys.batch_queue})}\n")
        sys.stdout.flush()
        try:
            runner.work()
        finally:
            chores.end()


def scheduled(warm: str, warm_every: int, tidy_every: int) -> list[Chore]:
    """What is to be done now and again."""
    found = [Chore("warm", warm_every, ("batch", "warm", warm))] if warm else []
    return [*found, *([Chore("tidy", tidy_every, ("batch", "tidy"))] if tidy_every else [])]


@click.command("workers")
@click.option("--here", is_flag=True, help="Only those of this machine or container. Exit status 1 when none is well.")
@broker_options
@json_option
def workers(here: bool, redis: str, namespace: str, as_json: bool) -> None:
    """List the workers of batches."""
    from kvstore import batch_queue

    with opened(redis, namespace) as store:
        found = batch_queue.workers(store)
    if here:
        found = [each for each in found if each.host == socket.gethostname() and each.heartbeat_age_s < ALIVE_S]
    if as_json:
        emit_json([asdict(each) for each in found])
    else:
        rows = [(each.name, each.state, each.batch or "-", age(int(each.heartbeat_age_s * 1000))) for each in found]
        print_table(COLUMNS, rows, none="There is no worker of batches; octavo batch worker starts one.")
    if here and not found:
        raise SystemExit(1)


def worker_name() -> str:
    """Another one for each life of a process."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:48]
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"
