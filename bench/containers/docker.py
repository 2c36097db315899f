"""The containers of one compose project, as the docker commands tell of them."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from ops.console import emit

if TYPE_CHECKING:
    from collections.abc import Callable

PROJECT = "octavo-transcript"
"""Not the name that people's own fleets have: what it makes is removed at the end."""
HEALTHY_S = 400.0
"""Includes the first conversion of the model."""


@dataclass(frozen=True, slots=True)
class Container:
    """What Docker tells of one. `pid`: of its first process, as seen from outside; `ports`: published, by inner one."""

    id: str
    name: str
    service: str
    pid: int
    health: str
    restarts: int
    ports: dict[str, str]

    @property
    def target(self) -> str:
        """HOST:PORT of a gateway's gRPC."""
        return f"127.0.0.1:{self.ports['50051']}"


def show(*command: str, quiet: bool = False) -> str:
    """Runs a command as a reader would type it. Raises CalledProcessError."""
    emit(f"$ {shlex.join(command)}")
    ran = subprocess.run(command, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if not quiet or ran.returncode:
        emit(ran.stdout.rstrip())
    ran.check_returncode()
    return ran.stdout


def compose() -> list[str]:
    """The plugin, or docker-compose 1.29."""
    plugin = subprocess.run(["docker", "compose", "version"], check=False, capture_output=True)
    command = ["docker-compose"] if plugin.returncode else ["docker", "compose"]
    return [*command, "-p", PROJECT, "-f", "deploy/compose.yaml"]


def containers(service: str = "") -> list[Container]:
    """Of this project, by name."""
    label = "com.docker.compose."
    asked = ["docker", "ps", "-aq", "--filter", f"label={label}project={PROJECT}"]
    ids = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.split()
    if not ids:
        return []
    told = json.loads(subprocess.run(["docker", "inspect", *ids], check=True, capture_output=True).stdout)
    found = [
        Container(
            id=each["Id"][:12],
            name=each["Name"].lstrip("/"),
            service=each["Config"]["Labels"][label + "service"],
            pid=each["State"]["Pid"],
            health=each["State"].get("Health", {}).get("Status", each["State"]["Status"]),
            restarts=each["RestartCount"],
            ports={
                inner.removesuffix("/tcp"): outer[0]["HostPort"]
                for inner, outer in each["NetworkSettings"]["Ports"].items()
                if outer
            },
        )
        for each in told
    ]
    return sorted((each for each in found if service in ("", each.service)), key=lambda each: each.name)


def until(what: str, holds: Callable[[], bool], within_s: float = HEALTHY_S) -> None:
    """Waits. Raises ClickException where it is in vain."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > within_s:
            raise click.ClickException(f"not within {within_s:g} s: {what}")
        time.sleep(0.5)
    emit(f"# {what}: after {time.monotonic() - began:.0f} s")


def all_healthy() -> bool:
    return all(each.health == "healthy" for each in containers())


def kill(container: Container) -> None:
    emit(f"# kill -9 of {container.name}: process {container.pid} and all others in it")
    os.kill(container.pid, signal.SIGKILL)
