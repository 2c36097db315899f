"""`python -m tests.chaos`, in a checkout: one run, told in the end. Exits with 1 when a promise was broken."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from tests.chaos.driver import Habits
from tests.chaos.evidence import Rules
from tests.chaos.run import ChaosConfig, run_chaos
from tests.chaos.schedule import Kind

if TYPE_CHECKING:
    from tests.chaos.run import Report

GRACE_S: Final = 8.0
"""Of a process that is asked to end: less than it may take to come back."""


@click.command()
@click.option("--seed", default=0, help="Of schedule, traffic and mutations.", show_default=True)
@click.option("--seconds", default=60.0, help="How long clients send and faults strike.", show_default=True)
@click.option("--minutes", type=float, default=None, help="The same, for long runs.")
@click.option("--workers", default=3, show_default=True)
@click.option("--gateways", default=2, show_default=True)
@click.option("--threads", default=1, help="Of each worker.", show_default=True)
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--kv-tokens", default=8192, help="Of each worker's pool.", show_default=True)
@click.option("--rate", default=2.0, help="Requests per second.", show_default=True)
@click.option("--deadline", default=120.0, help="Of each request, in seconds.", show_default=True)
@click.option("--payloads", default=48, help="Different requests; each is asked for once without faults.")
@click.option("--every", default=6.0, help="Mean seconds from one fault to the next.", show_default=True)
@click.option("--start", default=15.0, help="Seconds that a process may take to come back.", show_default=True)
@click.option("--kind", "kinds", multiple=True, type=click.Choice([kind.value for kind in Kind]), help="Default: all.")
@click.option("--lossy", is_flag=True, help="Accepted requests may end with UNAVAILABLE.")
@click.option("--mutations", default=2, help="How often each is tried on what the run left.", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path("chaos-results"), show_default=True)
def main(out: Path, **values: Any) -> None:
    """Runs a fleet under a seeded schedule of faults and checks I1 to I7. Into --out go the clients' history, what the
    processes said, and the report as JSON."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "log.txt").open("w") as log:
        report = asyncio.run(_run(out, values, log))
    (out / "report.json").write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    click.echo(str(report))
    if not report.passed:
        raise SystemExit(1)


async def _run(out: Path, values: dict[str, Any], log: Any) -> Report:
    from ops.config import FleetConfig

    seconds = values["minutes"] * 60 if values["minutes"] else values["seconds"]
    config = ChaosConfig(
        seed=values["seed"],
        seconds=seconds,
        payloads=values["payloads"],
        kinds=tuple(map(Kind, values["kinds"])) or tuple(Kind),
        every_s=values["every"],
        start_s=values["start"],
        habits=Habits(rate=values["rate"], deadline_s=values["deadline"]),
        rules=Rules(lossless=not values["lossy"], ample_deadlines=not values["lossy"]),
        mutations=values["mutations"],
    )
    sizes = {name: values[name] for name in ("workers", "gateways", "threads", "model", "kv_tokens")}
    settings = FleetConfig(namespace="chaos", grace=GRACE_S, **sizes)

    def sink(name: str, line: str) -> None:
        log.write(f"{name} {line}\n")
        log.flush()

    return await run_chaos(config, settings, out, click.echo, sink)


if __name__ == "__main__":
    main()
