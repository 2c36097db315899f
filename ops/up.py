"""`octavo up`: a whole fleet in the foreground."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import click

from kvstore.errors import KvError
from ops.child import ChildFailed
from ops.config import FleetConfig, fleet_config, fleet_options
from ops.console import INTERRUPTED, Interrupts, emit, note, pass_on
from ops.fleet import Fleet
from ops.reach import access_options
from ops.tasks import first_of

if TYPE_CHECKING:
    from gateway.access import Access


@click.command("up")
@fleet_options(workers=1, grpc_port=50051)
@access_options("--client-cert", "--client-key")
def command(access: Access, **values: Any) -> None:
    """Run a whole fleet in the foreground: broker, gateways, workers.

    Prints one line `ready {json}` with the addresses on stdout; everything else goes to stderr. Ctrl-C (or SIGTERM)
    drains: gateways finish their streams, then workers leave, then the embedded broker stops. A second one ends
    everything at once. A gateway or worker that dies is started again.

    Other settings of gateways and workers are theirs by OCTAVO_* variables: see octavo gateway --help and octavo worker
    --help. --tls-ca and the like are for this command's own look at its gateways: whether they serve.
    """
    try:
        code = asyncio.run(run(fleet_config(values), access))
    except (ChildFailed, KvError) as error:
        raise click.ClickException(str(error)) from error
    if code:
        raise SystemExit(code)


async def run(config: FleetConfig, access: Access | None = None) -> int:
    """Starts the fleet and stays until it is told to end. Returns the exit status."""
    interrupts = Interrupts().install()
    fleet = Fleet(config, pass_on, note, access)
    what = f"{config.workers} worker(s) and {config.gateways} gateway(s)"
    starting = asyncio.create_task(fleet.start(lambda: note(f"starting {what}")))
    await first_of(asyncio.wait([starting]), interrupts.first.wait())
    if not starting.done():
        note("stopping before everything was ready")
        starting.cancel()
        await asyncio.wait([starting])
        return INTERRUPTED
    starting.result()
    announce(fleet)
    await first_of(asyncio.wait([fleet.lost]), interrupts.first.wait())
    if fleet.lost.done():
        note(fleet.lost.result())
        fleet.kill()
        await fleet.stop()
        return 1
    note("draining; once more to end at once")
    stopping = asyncio.create_task(fleet.stop())
    await first_of(asyncio.wait([stopping]), interrupts.second.wait())
    if not stopping.done():
        note("ending everything at once")
        fleet.kill()
    await stopping
    note("stopped")
    return INTERRUPTED if interrupts.second.is_set() else 0


def announce(fleet: Fleet) -> None:
    """The ready lines: one for people, one for programs."""
    config = fleet.config
    told = [f"http://{where}/v1" for member in fleet.gateways if (where := member.child.ready.get("http")) is not None]
    http = f"HTTP on {', '.join(dict.fromkeys(told))}; " if told else ""
    broker = "its own broker" if not config.redis else "the given Redis"
    note(f"ready: gRPC on {', '.join(fleet.targets)}; {http}{config.model} on {config.workers} worker(s); {broker}")
    emit(f"ready {json.dumps(fleet.facts())}")
