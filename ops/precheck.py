"""What is wrong with a fleet at first sight: told before any of its processes is started."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING

import click

from kvstore.client import Broker, BrokerConfig
from kvstore.errors import KvError

if TYPE_CHECKING:
    from ops.config import FleetConfig

AUTO = ("auto", "none")


async def check(config: FleetConfig) -> None:
    """Raises click.ClickException, which names the option of `octavo up` that is at fault."""
    if config.redis:
        try:
            Broker(BrokerConfig(config.redis, config.namespace))
        except (KvError, ValueError) as error:
            raise click.ClickException(str(error)) from error
    check_ports(config)
    check_pages(config.pages)
    check_kernels(config.kernels)
    from worker.options import SHARED

    if (config.model, config.device) != (SHARED["--model"]["default"], SHARED["--device"]["default"]):
        await check_model(config)


def listens_on() -> str:
    """The host that processes take from OCTAVO_HOST."""
    return os.environ.get("OCTAVO_HOST") or "127.0.0.1"


def check_ports(config: FleetConfig) -> None:
    """Those that are not left to the system to choose."""
    from gateway.config import PortError, require_port

    host = listens_on()
    own = 1 if config.one_port else config.gateways
    for first, count, option in (
        (config.grpc_port, own, "--grpc-port"),
        (config.http_port or 0, own, "--http-port"),
        (config.metrics_port, config.gateways + config.workers, "--metrics-port"),
    ):
        if first + count - 1 > 65535:
            raise click.BadParameter(f"{count} ports from {first} on end beyond 65535", param_hint=option)
        for port in range(first, first + count if first else first):
            try:
                require_port(host, port, option)
            except PortError as error:
                raise click.ClickException(str(error)) from error


def check_pages(pages: str) -> None:
    """A folder for pages must be there, or be made."""
    kind, _, path = pages.partition(":")
    if kind != "dir":
        return
    from kvstore.page_dir import PageFolderError, require_folder

    try:
        require_folder(path)
    except PageFolderError as error:
        raise click.ClickException(str(error)) from error


def check_kernels(level: str) -> None:
    """A build that is asked for by name must be there, and run on this processor."""
    if level in AUTO:
        return
    from worker.kernels.native.library import Native, NativeUnavailableError

    try:
        Native(level, threads=1)
    except NativeUnavailableError as error:
        raise click.BadParameter(str(error), param_hint="--kernels") from error


async def check_model(config: FleetConfig) -> None:
    """Asks a process that ends at once: what knows models and devices takes hundreds of megabytes."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "worker.look", config.model, config.dtype, config.device),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, said = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        lines = said.decode("utf-8", "replace").strip().splitlines() or [f"exit status {process.returncode}"]
        raise click.ClickException(lines[-1])
