"""``octavo worker``: one worker process."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import logging
import os
import re
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvstore import logs
from kvstore.client import BrokerConfig, connect
from kvstore.errors import KvError
from kvstore.keys import DEFAULT_NAMESPACE
from kvstore.ranges import THREADS_OR_AUTO, Finite
from kvstore.registry import new_incarnation
from kvstore.tracing import tracing
from worker.config import MAX_ID_LENGTH, PagesConfig, WorkerConfig
from worker.errors import LeaseLostError, StoppedError, StuckError
from worker.model.errors import ModelError
from worker.options import SHARED, check_sizes, pages_place, setting

if TYPE_CHECKING:
    from threading import Thread
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import CollectorRegistry

    from kvstore.client import Broker
    from kvstore.registry import WorkerInfo
    from worker.assemble import Assembled
    from worker.loop import WorkerLoop

logger = logging.getLogger("worker")

EXIT_STUCK = 70
"""Exit status of a worker that gave itself up."""


def default_id() -> str:
    """One worker per container or host needs no name; several on one host are told apart by their process."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
    return f"{host}-{os.getpid()}"[-MAX_ID_LENGTH:]


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "octavo"


def reachable(host: str) -> str:
    """A name for others of what one listens on."""
    return socket.gethostname() if host in ("0.0.0.0", "::", "") else host


def option(name: str, **kwargs: object) -> click.Option:
    """An option that can also be given as ``OCTAVO_<NAME>``."""
    return click.Option(
        [name],
        envvar="OCTAVO_" + setting(name).upper(),
        show_envvar=True,
        show_default=kwargs.get("default") != "",
        **kwargs,  # type: ignore[arg-type]
    )


def shared(*names: str) -> list[click.Option]:
    """Those that `octavo up` has too."""
    return [option(name, **SHARED[name]) for name in names]


OPTIONS = [
    *shared("--model"),
    option("--model-name", default="", help="Name that clients ask for. Default: the model's own."),
    option("--id", default="", help="Name of this worker, unique in its fleet. Default: host and process."),
    option("--redis", default="redis://127.0.0.1:6379/0", help="URL of the broker."),
    option("--namespace", default=DEFAULT_NAMESPACE, help="Fleet's name within one Redis."),
    *shared("--dtype", "--kv-dtype", "--device", "--kernels"),
    option("--cache", type=click.Path(path_type=Path), default=None, help="Where converted models are kept."),
    *shared("--kv-tokens", "--cache-tokens", "--block-size", "--block-run"),
    *shared("--pages", "--pages-redis", "--pages-bytes", "--pages-ttl", "--spill-buffer"),
    *shared("--max-running", "--step-tokens", "--chunk-tokens", "--steal/--no-steal"),
    option("--threads", type=THREADS_OR_AUTO, default=0, help="Threads of a product; 0: one per core."),
    option("--otlp", default="", help="URL of an OpenTelemetry collector (gRPC) that gets traces of requests."),
    option("--log-format", type=click.Choice(logs.FORMATS), default=logs.TEXT, help="Of what it logs."),
    option("--host", default="127.0.0.1", help="Address that metrics are served on."),
    option("--metrics-port", type=click.IntRange(0, 65535), default=0, help="Port of /metrics; 0: any free one."),
    option(
        "--grace",
        type=Finite(min=0),
        default=30.0,
        help="Seconds that jobs may go on after SIGTERM or Ctrl-C. A second signal ends them at once.",
    ),
    option("--orphan-grace", type=Finite(min=0), default=45.0, help="And when their gateway has died."),
]


def run(**flags: object) -> None:
    """One worker: claims jobs from its Redis stream and runs them in a continuous batch."""
    config, incarnation = config_of(flags), new_incarnation()
    logs.configure(config.log_format, role="worker", worker=config.id, incarnation=incarnation)
    try:
        asyncio.run(serve(config, incarnation))
    except (KvError, ModelError, LeaseLostError) as error:
        raise logs.Ends(str(error), config.log_format) from error
    except StuckError as error:
        # Not the ordinary way out: it would wait for the engine's thread, which may never return.
        logger.critical("%s", error)
        leave(EXIT_STUCK)
    except StoppedError as error:
        logger.warning("%s", error)
        leave(0)


def leave(status: int) -> None:
    """Ends the process without waiting for its threads."""
    logging.shutdown()
    os._exit(status)


command = click.Command("worker", callback=run, params=list(OPTIONS), help=run.__doc__)


def config_of(flags: dict[str, object]) -> WorkerConfig:
    """Flags as a checked configuration."""
    given = dict(flags)
    worker_id = str(given.pop("id")) or default_id()
    if not re.fullmatch(rf"[A-Za-z0-9._:-]{{1,{MAX_ID_LENGTH}}}", worker_id):
        raise click.BadParameter(f"{worker_id!r} is not 1 to {MAX_ID_LENGTH} of [A-Za-z0-9._:-]", param_hint="--id")
    broker = BrokerConfig(url=str(given.pop("redis")), namespace=str(given.pop("namespace")))
    cache_dir = Path(str(given.pop("cache") or default_cache())).expanduser()
    pages = pages_of(given, broker.url)
    config = WorkerConfig(id=worker_id, broker=broker, cache_dir=cache_dir, pages=pages, **given)  # type: ignore[arg-type]
    check_sizes(config.kv_tokens, config.block_size)
    return config


def pages_of(given: dict[str, object], broker: str) -> PagesConfig | None:
    """Takes what concerns pages out of the flags."""
    place = pages_place(str(given.pop("pages")), str(given.pop("pages_redis")), broker)
    sizes = {
        name: given.pop(flag)
        for name, flag in (("budget", "pages_bytes"), ("ttl", "pages_ttl"), ("buffer", "spill_buffer"))
    }
    return None if place is None else PagesConfig(*place, **sizes)  # type: ignore[arg-type]


async def serve(config: WorkerConfig, incarnation: str) -> None:
    """Connects, loads, registers, serves; returns after a drain. What is wrong at first sight is told before the broker
    is waited for."""
    from prometheus_client import CollectorRegistry

    from kvstore.registry import Registry
    from worker.look import look
    from worker.loop import WorkerLoop
    from worker.metrics import WorkerMetrics
    from worker.page_metrics import PageMetrics
    from worker.pages import Pages, open_store

    look(config.model, dtype=config.dtype, device=config.device)
    traced = tracing(config.otlp, role="worker", worker=config.id, incarnation=incarnation)
    store = None if config.pages is None else open_store(config.pages, config.broker.namespace)
    stop, hurry = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
    prometheus = CollectorRegistry()
    server, serving = serve_metrics(config, prometheus)
    address = f"{reachable(config.host)}:{server.server_port}"
    broker: Broker | None = None
    try:
        broker = await connect(config.broker)
        registry = Registry(broker)
        await registry.require_free(config.id)  # again at registration: loading takes a while
        worker = await loaded(config, incarnation, address, stop)
        # What is loaded now stays: without this every full collection walks it, in the middle of a step and at exit.
        gc.collect()
        gc.freeze()
        await registry.publish_model(worker.card)
        await registry.register(worker.info)
        pages = None
        if config.pages is not None and store is not None:
            pages = Pages(config.pages, store, worker.form, PageMetrics(prometheus))
        metrics = WorkerMetrics(prometheus, traced)
        loop = WorkerLoop(config, broker, worker.engine, worker.info, worker.card, metrics, pages)
        tell_ready(worker.info)
        await until_stopped(loop, stop, hurry)
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
        if store is not None:
            await store.close()
        if broker is not None:
            await broker.close()
        await traced.close()


async def loaded(config: WorkerConfig, incarnation: str, address: str, stop: asyncio.Event) -> Assembled:
    """The worker's parts, its model loaded. Raises ModelError; StoppedError when it is told to stop before that."""
    from worker import assemble

    # Not the event loop's own threads, for which it waits when it ends.
    thread = ThreadPoolExecutor(1, thread_name_prefix="load")
    arguments = config, incarnation, address, logger.info
    loading = asyncio.get_running_loop().run_in_executor(thread, assemble.build, *arguments)
    thread.shutdown(wait=False)
    stopping = asyncio.create_task(stop.wait())
    either: list[asyncio.Future[Any]] = [loading, stopping]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not loading.done():
        raise StoppedError("told to stop while the model was loaded")
    return loading.result()


def serve_metrics(config: WorkerConfig, registry: CollectorRegistry) -> tuple[WSGIServer, Thread]:
    """The server of /metrics and its thread. Raises Ends for a port that can't be listened on."""
    from prometheus_client import start_http_server

    try:
        return start_http_server(config.metrics_port, addr=config.host, registry=registry)
    except OSError as error:
        hint = "see --host and --metrics-port"
        if error.errno == errno.EADDRINUSE:
            hint = "choose another port with --metrics-port, or any free one with --metrics-port 0"
        where = f"{config.host}:{config.metrics_port}"
        told = f"cannot listen on {where}: {error.strerror or error}; {hint}"
        raise logs.Ends(told, config.log_format) from error


def tell_ready(info: WorkerInfo) -> None:
    """One line for whoever started this process: jobs are taken from now on."""
    ready = {"worker": info.id, "incarnation": info.incarnation, "model": info.model, "metrics": info.metrics}
    sys.stdout.write(f"ready {json.dumps(ready)}\n")
    sys.stdout.flush()


async def until_stopped(loop: WorkerLoop, stop: asyncio.Event, hurry: asyncio.Event) -> None:
    """Runs the loop; the first signal begins its drain, the second ends the drain's grace time."""
    running = asyncio.create_task(loop.run())
    for signalled in (stop, hurry):
        told = asyncio.create_task(signalled.wait())
        await asyncio.wait([running, told], return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if running.done():
            break
        loop.drain(at_once=signalled is hurry)
    await running


if __name__ == "__main__":
    command()
