"""What a fleet is told, and the command lines of its processes."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import click

from kvstore.ranges import THREADS, Finite

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_TARGET = "127.0.0.1:50051"
"""HOST:PORT of the gateway that commands call; where `octavo up` and `octavo gateway` listen."""

POLICIES = ("prefix", "least-loaded", "round-robin", "random")
"""As ``gateway.router`` has them, which is not loaded for a supervisor."""


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Settings of a fleet. None leaves the choice to the process that it concerns. Times in seconds."""

    workers: int = 1
    gateways: int = 1
    grpc_port: int = 50051
    """Of the first gateway; the others take the next ones. 0: any free ones."""
    metrics_port: int = 0
    """Of the first process, gateways before workers; the others take the next ones. 0: any free ones."""
    http_port: int | None = None
    """Of the first gateway; the others take the next ones. 0: any free ones; None: no HTTP."""
    one_port: bool = False
    """Gateways share the first one's gRPC and HTTP ports: the system hands each connection to one of them."""
    policy: str = "prefix"
    """How gateways choose workers."""
    redis: str = ""
    """URL of the broker; empty: an embedded one, started and stopped with the fleet."""
    namespace: str = "default"
    model: str = "smollm2-135m"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    device: str = "auto"
    kernels: str = "auto"
    kv_tokens: int | None = None
    cache_tokens: int | None = None
    block_size: int | None = None
    block_run: int | None = None
    max_running: int | None = None
    step_tokens: int | None = None
    chunk_tokens: int | None = None
    pages: str = "none"
    """Where blocks go when they leave a pool: ``none``, ``redis`` or ``dir:PATH``."""
    pages_redis: str = ""
    """URL of a server for pages; it goes to workers through their environment."""
    pages_bytes: int | None = None
    pages_ttl: float | None = None
    spill_buffer: int | None = None
    steal: bool = True
    """Free workers take jobs that wait for a full one."""
    threads: int | None = None
    """Of each worker; None: the cores shared out among the workers."""
    grace: float = 30.0
    """How long streams may go on after the fleet was told to stop."""
    start_timeout: float = 600.0

    def worker_ids(self) -> list[str]:
        """On a broker that several machines may share, the host's name keeps ids apart."""
        host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:48]
        prefix = f"{host}-w" if self.redis else "w"
        return [f"{prefix}{index}" for index in range(self.workers)]

    def threads_per_worker(self, cores: int) -> int:
        """Threads of each worker on a machine of `cores` cores."""
        return self.threads if self.threads is not None else max(1, cores // self.workers)

    def gateway_arguments(self, index: int, grpc_port: int | None = None, http_port: int | None = None) -> list[str]:
        """For `python -m`; the ports override the configured ones (a gateway that comes back keeps its own)."""
        nth = 0 if self.one_port else index
        port = _nth(self.grpc_port, nth) if grpc_port is None else grpc_port
        http = http_port
        if http is None and self.http_port is not None:
            http = _nth(self.http_port, nth)
        return [
            "gateway",
            *("--namespace", self.namespace),
            *("--grpc-port", str(port)),
            *("--metrics-port", str(_nth(self.metrics_port, index))),
            *(("--http-port", str(http)) if http is not None else ()),
            *(("--reuse-port",) if self.one_port else ()),
            *("--policy", self.policy),
            *(("--pages", self.pages) if self.pages != "none" else ()),
            *(("--pages-ttl", str(self.pages_ttl)) if self.pages_ttl is not None else ()),
            *("--grace", f"{self.grace:g}"),
        ]

    def worker_arguments(self, index: int, cores: int) -> list[str]:
        """For `python -m`."""
        optional = {
            "--kv-tokens": self.kv_tokens,
            "--cache-tokens": self.cache_tokens,
            "--block-size": self.block_size,
            "--block-run": self.block_run,
            "--max-running": self.max_running,
            "--step-tokens": self.step_tokens,
            "--chunk-tokens": self.chunk_tokens,
            "--pages": None if self.pages == "none" else self.pages,
            "--pages-bytes": self.pages_bytes,
            "--pages-ttl": self.pages_ttl,
            "--spill-buffer": self.spill_buffer,
        }
        return [
            "worker",
            *("--id", self.worker_ids()[index]),
            *("--namespace", self.namespace),
            *("--model", self.model),
            *("--dtype", self.dtype),
            *("--kv-dtype", self.kv_dtype),
            *("--device", self.device),
            *("--kernels", self.kernels),
            *("--threads", str(self.threads_per_worker(cores))),
            *("--metrics-port", str(_nth(self.metrics_port, self.gateways + index))),
            *("--grace", f"{self.grace:g}"),
            *(part for name, value in optional.items() if value is not None for part in (name, str(value))),
            *(() if self.steal else ("--no-steal",)),
        ]


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _nth(base: int, index: int) -> int:
    return base + index if base else 0


def option(name: str, **settings: Any) -> Callable[[F], F]:
    """An option that OCTAVO_<NAME> sets too."""
    variable = "OCTAVO_" + name.split("/")[0].lstrip("-").replace("-", "_").upper()
    settings.setdefault("show_default", bool(settings.get("default")))
    return click.option(name, envvar=variable, show_envvar=True, **settings)


def fleet_options(*, workers: int, grpc_port: int) -> Callable[[F], F]:
    """The options that describe a fleet, with a command's own defaults; `fleet_config` reads them."""
    from worker.options import SHARED, setting

    positive, port = click.IntRange(min=1), click.IntRange(0, 65535)
    names = {field.name: field.default for field in fields(FleetConfig)}
    of_workers = []
    for name, settings in SHARED.items():
        own, theirs = names[setting(name)], settings["default"]
        told = settings["help"]
        if not own and theirs not in (None, ""):
            # The fleet leaves the choice to the workers: click would put what they choose in brackets.
            told += f" Default: {theirs}."
        of_workers.append(option(name, **{**settings, "default": own, "help": told}))
    options = [
        option("--workers", type=positive, default=workers, help="Workers to start."),
        option("--gateways", type=positive, default=1, help="Gateways to start."),
        option("--grpc-port", type=port, default=grpc_port, help="Of the first gateway; others follow. 0: any free."),
        option("--metrics-port", type=port, default=0, help="Of the first process; others follow. 0: any free ones."),
        option(
            "--http-port",
            type=port,
            default=None,
            help="Of the first gateway, for OpenAI's API; others follow. 0: any free.",
        ),
        option("--one-port", is_flag=True, help="All gateways listen on the first one's ports."),
        option("--policy", type=click.Choice(POLICIES), default="prefix", help="How gateways choose workers."),
        option("--redis", default="", help="URL of a Redis 7 or Valkey 8 server. Default: an embedded one."),
        option("--namespace", default="default", help="The fleet's name within one Redis."),
        *of_workers,
        option("--threads", type=THREADS, default=None, help="Of each worker. Default: the cores, shared out."),
        option("--grace", type=Finite(min=0), default=30.0, help="Seconds that streams get to end at a stop."),
    ]

    def decorate(function: F) -> F:
        for each in reversed(options):
            function = each(function)
        return function

    return decorate


def fleet_config(values: dict[str, Any]) -> FleetConfig:
    """Takes its settings out of a command's values; what is left in `values` is the command's own.

    Raises:
        click.BadParameter: sizes that don't fit each other.
    """
    from worker.options import check_sizes, pages_place

    names = [field.name for field in fields(FleetConfig) if field.name in values]
    config = FleetConfig(**{name: values.pop(name) for name in names})
    check_sizes(config.kv_tokens, config.block_size)
    pages_place(config.pages, config.pages_redis, config.redis)
    return config
