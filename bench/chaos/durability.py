"""`octavo bench durability`: what it costs that the broker writes down what it answers for.

One fleet on one server with a folder of its own. Between two levels the server is told to write its append-only file
otherwise, so that all levels have the same processes, caches and machine; rounds take turns, so that a machine that
slows down slows all of them.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from bench.chaos.server import Server
from bench.chaos.waiting import until
from bench.machine import describe_machine
from bench.runner import measure, warm_up
from ops.client import Client, plain
from ops.console import Loading
from ops.fleet import Fleet

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from bench.stats import Level
    from bench.workload import Workload
    from kvstore.client import Broker
    from ops.config import FleetConfig

MODES: Final = ("no", "everysec", "always")
"""no: nothing is written. everysec: written at once, synced every second. always: synced before it is answered."""
REWRITE_S: Final = 60.0
"""For so long the file may be begun anew when writing is switched on."""
COLUMNS: Final = (
    *("append-only", "output tok/s", "of none", "TTFT p50", "p90", "p99"),
    *("per token p50", "p99", "bytes/token", "errors"),
)


@dataclass(frozen=True, slots=True)
class DurabilityConfig:
    """One run."""

    workload: Workload
    concurrency: int = 16
    requests: int = 64
    """Of each round."""
    rounds: int = 3
    modes: tuple[str, ...] = MODES


@dataclass(frozen=True, slots=True)
class Round:
    """One mode, once."""

    mode: str
    level: Level
    file_bytes: int
    """That the append-only file grew by."""


async def run_durability(
    config: DurabilityConfig, settings: FleetConfig, folder: Path, note: Callable[[str], None]
) -> dict[str, Any]:
    """``folder`` is for the broker's data: it is its disk that is measured. What is printed as JSON. Raises ChildFailed
    and KvError when the fleet does not start, AioRpcError when it does not serve."""
    machine = describe_machine()
    server = Server(folder / "broker")
    await server.start(empty=True)
    try:
        broker = await server.connect(settings.namespace)
        try:
            rounds, model = await _on_fleet(config, settings, server, broker, note)
        finally:
            await broker.close()
    finally:
        await server.stop()
    return {"machine": machine, "model": model, "modes": summarise(rounds), "rounds": [asdict(each) for each in rounds]}


async def _on_fleet(
    config: DurabilityConfig, settings: FleetConfig, server: Server, broker: Broker, note: Callable[[str], None]
) -> tuple[list[Round], dict[str, Any]]:
    loading, rounds = Loading(), list[Round]()
    async with (
        Fleet(replace(settings, redis=server.url), loading.sink, note) as fleet,
        Client(fleet.targets[0]) as client,
    ):
        loading.over = True
        model = await client.model()
        for turn in range(config.rounds):
            for index, mode in enumerate(config.modes):
                await write_down(broker, mode)
                # Every round's prompts are its own: a hit in a cache would be no work.
                workload = _salted(config.workload)
                stream = turn * len(config.modes) + index
                await warm_up(client, workload.requests(config.concurrency, model.vocab_size, stream=-1 - stream))
                before = await file_bytes(broker)
                requests = workload.requests(config.requests, model.vocab_size, stream=stream)
                level, _ = await measure(client, requests, config.concurrency)
                rounds.append(Round(mode, level, max(0, await file_bytes(broker) - before)))
                note(f"round {turn + 1} of {config.rounds}, {mode}: {level.output_tokens_per_s:.0f} tok/s")
        return rounds, plain(model)


def _salted(workload: Workload) -> Workload:
    return replace(workload, cache_salt=secrets.token_hex(8))


async def write_down(broker: Broker, mode: str) -> None:
    """Makes the server write its append-only file in this way, from now on. Raises BrokerError, TimeoutError."""
    if mode == "no":
        await broker.call("CONFIG", "SET", "appendonly", "no")
        return
    await broker.call("CONFIG", "SET", "appendfsync", mode)
    await broker.call("CONFIG", "SET", "appendonly", "yes")

    async def written() -> bool:
        """Whether the file that begins with what is there already is complete."""
        told = await broker.call("INFO", "persistence")
        return not int(told["aof_rewrite_in_progress"]) and not int(told["aof_rewrite_scheduled"])

    await until(written, within_s=REWRITE_S)


async def file_bytes(broker: Broker) -> int:
    """Size of the append-only file; 0 where none is written. Raises BrokerError."""
    told = await broker.call("INFO", "persistence")
    return int(told.get("aof_current_size", 0)) if int(told["aof_enabled"]) else 0


def summarise(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """A row for each mode, in the order in which they first came: medians of its rounds; times in seconds, None where
    nothing was answered."""
    rows: list[dict[str, Any]] = []
    for mode in dict.fromkeys(each.mode for each in rounds):
        own = [each for each in rounds if each.mode == mode]
        tokens = sum(each.level.output_tokens for each in own)
        rows.append(
            {
                "mode": mode,
                "output_tokens_per_s": median(each.level.output_tokens_per_s for each in own),
                "first_token_s": _medians([each.level.first_token_s for each in own]),
                "seconds_per_token": _medians([each.level.seconds_per_token for each in own]),
                "bytes_per_token": sum(each.file_bytes for each in own) / tokens if tokens else None,
                "errors": sum(sum(each.level.errors.values()) for each in own),
            }
        )
    none = next((row["output_tokens_per_s"] for row in rows if row["mode"] == "no"), None)
    for row in rows:
        row["of_none"] = row["output_tokens_per_s"] / none if none else None
    return rows


def _medians(spreads: Sequence[Any]) -> dict[str, float] | None:
    known = [spread for spread in spreads if spread is not None]
    if not known:
        return None
    return {rank: median(getattr(spread, rank) for spread in known) for rank in ("p50", "p90", "p99")}


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A line of the table; see COLUMNS. Times in milliseconds."""

    def shown(name: str, rank: str) -> str:
        return "-" if row[name] is None else f"{row[name][rank] * 1000:.1f} ms"

    return (
        row["mode"],
        f"{row['output_tokens_per_s']:.1f}",
        "-" if row["of_none"] is None else f"{row['of_none']:.3f}",
        *(shown("first_token_s", rank) for rank in ("p50", "p90", "p99")),
        *(shown("seconds_per_token", rank) for rank in ("p50", "p99")),
        "-" if row["bytes_per_token"] is None else f"{row['bytes_per_token']:.0f}",
        str(row["errors"]),
    )
