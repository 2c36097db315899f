"""`octavo bench chaos`: one run, told in the end. Exits with 1 when a promise was broken."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from bench.chaos.schedule import Kind
from bench.output import results_folder, write_json
from kvstore.errors import KvError
from kvstore.ranges import THREADS, Finite
from ops.child import ChildFailed
from ops.config import FleetConfig
from ops.console import emit, emit_json, note, unless_interrupted

if TYPE_CHECKING:
    from bench.chaos.run import Report

GRACE_S: Final = 8.0
"""Of a process that is asked to end. It comes back after that and ``--start``."""
SHARE: Final = 0.5
"""Of what the fleet answers without faults, which often has a worker less."""
STARTS_S: Final = 18.0
"""What a process may take to come back under a load, on few cores."""
_SECONDS: Final = Finite(min=0, min_open=True)
_POSITIVE: Final = click.IntRange(min=1)


@click.command("chaos", context_settings={"show_default": True})
@click.option("--seed", type=int, default=0, help="Of schedule, traffic and mutations.")
@click.option("--seconds", type=_SECONDS, default=60.0, help="How long clients send and faults strike.")
@click.option("--minutes", type=_SECONDS, default=None, help="The same, for long runs.")
@click.option("--workers", type=_POSITIVE, default=3, help="Workers to start.")
@click.option("--gateways", type=_POSITIVE, default=2, help="Gateways to start.")
@click.option("--threads", type=THREADS, default=1, help="Of each worker.")
@click.option("--model", default=FleetConfig().model, help="As of a worker.")
@click.option("--kv-tokens", type=_POSITIVE, default=8192, help="Of each worker's pool.")
@click.option("--rate", type=_SECONDS, default=2.0, help="Requests per second, at most.")
@click.option("--deadline", type=_SECONDS, default=120.0, help="Of each request, in seconds.")
@click.option("--payloads", type=_POSITIVE, default=48, help="Different requests.")
@click.option("--every", type=_SECONDS, default=6.0, help="Mean seconds from fault to fault.")
@click.option("--start", type=_SECONDS, default=STARTS_S, help="Seconds that a process may take to start.")
@click.option("--kind", "kinds", multiple=True, type=click.Choice([kind.value for kind in Kind]), help="Default: all.")
@click.option("--mutations", type=_POSITIVE, default=2, help="How often each lie is tried on what the run left.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default="bench-results/chaos", help="Folder.")
def chaos(out: Path, as_json: bool, **values: Any) -> None:
    """Run a fleet under a seeded schedule of faults, and check that nothing that was accepted is lost.

    Every payload is asked for once while nothing fails: the right answers. Then clients send at a rate to all gateways,
    half of what the fleet has just borne at most, and go on elsewhere when a call breaks (each third request is left to
    the product's own client, which has to do that by itself), while processes are killed, frozen, ended, cut off, and
    the broker dies, loses data, slows down. In the end seven promises are checked: one end for each choice, no gap and
    no repeat, the same tokens as without faults, nothing left behind, pools and figures that add up, the right errors;
    and small lies are told to the checker about this very run, each of which it has to find. The history, what
    processes said and the report go into --out. Exits with 1 when a promise was broken.
    """
    from bench.chaos.checker import NoOracle

    results_folder(out)
    try:
        with (out / "log.txt").open("w") as log:
            report = asyncio.run(unless_interrupted(_run(out, values, log)))
    except (ChildFailed, KvError, FileNotFoundError, NoOracle, TimeoutError, ValueError) as error:
        raise click.ClickException(str(error) or "the fleet did not come back in time") from error
    write_json(report.as_dict(), out / "report.json")
    if as_json:
        emit_json(report.as_dict())
    else:
        emit(str(report))
    if not report.passed:
        raise SystemExit(1)


async def _run(out: Path, values: dict[str, Any], log: Any) -> Report:
    from bench.chaos.driver import Habits
    from bench.chaos.run import ChaosConfig, run_chaos

    seconds = values["minutes"] * 60 if values["minutes"] else values["seconds"]
    config = ChaosConfig(
        seed=values["seed"],
        seconds=seconds,
        payloads=values["payloads"],
        kinds=tuple(map(Kind, values["kinds"])) or tuple(Kind),
        every_s=values["every"],
        start_s=values["start"],
        share=SHARE,
        habits=Habits(rate=values["rate"], deadline_s=values["deadline"]),
        mutations=values["mutations"],
    )
    sizes = {name: values[name] for name in ("workers", "gateways", "threads", "model", "kv_tokens")}
    settings = FleetConfig(namespace="chaos", grace=GRACE_S, **sizes)

    def sink(name: str, line: str) -> None:
        log.write(f"{name} {line}\n")
        log.flush()

    return await run_chaos(config, settings, out, note, sink)
