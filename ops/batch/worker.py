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
from typing import TYPE_CHECKING, Final

import click

from ops.batch.options import broker_options, folder_option, json_option, opened
from ops.config import DEFAULT_TARGET, option
from ops.console import emit_json
from ops.show import age, print_table

if TYPE_CHECKING:
    from pathlib import Path

ALIVE_S: Final = 10.0
"""A worker whose last heartbeat is older is not well."""
COLUMNS: Final = ("name", "state", "batch", "heartbeat")


@click.command("worker")
@option("--target", default=DEFAULT_TARGET, help="HOST:PORT of gateways, with commas between them.")
@folder_option
@broker_options
def worker(target: str, batches: Path, redis: str, namespace: str) -> None:
    """Run batches, one after the other, until SIGTERM or Ctrl-C: what runs then is left, and goes on at another worker
    or after the next start. Several may run, on several machines."""
    from gateway.batch.job import JobConfig
    from kvstore.batch_queue import BatchWorker

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    batches.mkdir(parents=True, exist_ok=True)
    # rq hands a job to a process of its own, which has nothing but this.
    os.environ.update(JobConfig(redis, namespace, target, batches.resolve()).as_environment())
    with opened(redis, namespace) as store, store.translated():
        runner = BatchWorker(store, worker_name())
        sys.stdout.write(f"ready {json.dumps({'worker': runner.name, 'queue': store.keys.batch_queue})}\n")
        sys.stdout.flush()
        runner.work()


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
        print_table(COLUMNS, rows)
    if here and not found:
        raise SystemExit(1)


def worker_name() -> str:
    """Another one for each life of a process."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:48]
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"
