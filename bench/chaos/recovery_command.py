"""`octavo bench recovery`: options and what is printed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from bench.output import results_folder, write_json
from kvstore.errors import KvError
from kvstore.ranges import THREADS, Finite
from ops.child import ChildFailed
from ops.config import FleetConfig
from ops.console import emit, emit_json, note, unless_interrupted
from ops.show import print_table

_MORE_THAN_0 = Finite(min=0, min_open=True)
_POSITIVE = click.IntRange(min=1)
SCENARIOS = ("kill", "pair", "freeze", "cut", "roll")
GRACE_S = 4.0
"""What workers that are told to leave get for their streams: less than an answer takes, so that some have to move."""


@click.command("recovery")
@click.option("--scenario", "scenarios", multiple=True, type=click.Choice(SCENARIOS), help="Default: all, in turn.")
@click.option("--streams", type=_POSITIVE, default=64, show_default=True, help="Half of them greedy, half seeded.")
@click.option("--tokens", type=_POSITIVE, default=64, show_default=True, help="Of each answer.")
@click.option("--after", type=_POSITIVE, default=5, show_default=True, help="Tokens each has when the strike comes.")
@click.option(
    "--freeze", "freeze_s", type=_MORE_THAN_0, default=15.0, show_default=True, help="Seconds, of freeze and cut."
)
@click.option("--rate", type=_MORE_THAN_0, default=2.0, show_default=True, help="Requests per second, of `roll`.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed sends the same requests.")
@click.option("--workers", type=click.IntRange(min=2), default=2, show_default=True, help="Workers to start.")
@click.option("--gateways", type=click.IntRange(min=2), default=2, show_default=True, help="Gateways to start.")
@click.option("--threads", type=THREADS, default=1, show_default=True, help="Of each worker.")
@click.option("--model", default=FleetConfig().model, show_default=True, help="As of a worker.")
@click.option("--kv-tokens", type=_POSITIVE, default=16384, show_default=True, help="Of each worker's pool.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default="bench-results/recovery",
    show_default=True,
    help="Folder.",
)
def recovery(out: Path, as_json: bool, scenarios: tuple[str, ...], **values: Any) -> None:
    """Measure how soon streams go on when their worker goes, and check that they go on as if it had not.

    Every request is answered once alone. Then, in each scenario, all are sent at once, and when each has some tokens a
    worker is struck. kill: it is killed. pair: a gateway is killed, and a worker half a second later. freeze: it is
    stopped, and goes on when its streams are long elsewhere. cut: nothing passes between it and the broker for as long,
    and what it writes arrives late, and must be refused. roll: all workers are restarted, one after the other, under a
    steady load. Recovery is the longest wait for a new token since then, of streams that moved to another worker or had
    to be called for again. Exits with 1 when a token was lost, repeated or differed, when anything was left behind, or
    when a client saw an error though no gateway was struck.
    """
    from bench.chaos.checker import NoOracle
    from bench.chaos.recovery import run_recovery
    from bench.chaos.recovery_figures import COLUMNS
    from bench.chaos.scenarios import RecoveryConfig, Scenario

    if values["after"] >= values["tokens"]:
        raise click.BadParameter("answers are over by then", param_hint="--after")
    results_folder(out)
    sizes = {name: values.pop(name) for name in ("workers", "gateways", "threads", "model", "kv_tokens")}
    # Any worker can run all of them, so that none waits for a place while the others end.
    settings = FleetConfig(namespace="recovery", grace=GRACE_S, max_running=values["streams"], **sizes)
    config = RecoveryConfig(scenarios=tuple(map(Scenario, scenarios)) or tuple(Scenario), **values)
    try:
        with (out / "log.txt").open("w") as log:

            def sink(name: str, line: str) -> None:
                log.write(f"{name} {line}\n")
                log.flush()

            results = asyncio.run(unless_interrupted(run_recovery(config, settings, out, note, sink)))
    except (ChildFailed, KvError, FileNotFoundError, NoOracle, TimeoutError) as error:
        raise click.ClickException(str(error) or "the fleet did not come back in time") from error
    write_json(results, out / "recovery.json")
    if as_json:
        emit_json(results)
    else:
        print_table(COLUMNS, results["cells"])
        for finding in [each for row in results["scenarios"] for each in row["findings"]] + results["left"]:
            emit(finding)
    if not results["passed"]:
        raise SystemExit(1)
