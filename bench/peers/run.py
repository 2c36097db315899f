"""`octavo bench peers`: from options to results, and what is written and printed of them."""

from __future__ import annotations

import contextlib
import json
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.offline import Load, shown
from bench.peers.catalog import OURS, Variant, variants
from bench.peers.compare import Plan, compare
from bench.peers.prepare import Preparation
from ops.config import usable_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class PeersConfig:
    """One run."""

    variants: tuple[Variant, ...]
    """Ours first."""
    loads: tuple[Load, ...]
    model: str
    rounds: int
    seed: int
    threads: int
    turn_s: float
    """Limit of one workload, once."""
    cache: Path
    out: Path

    @classmethod
    def of(
        cls,
        *,
        names: str,
        ours: str,
        loads: tuple[Load, ...],
        model: str,
        rounds: int,
        seed: int,
        threads: int | None,
        turn_limit: float,
        cache: Path,
        out: Path,
    ) -> PeersConfig:
        """From options. Raises ValueError for an unknown peer or mode."""
        modes = [f"{OURS}:{mode.strip()}" for mode in ours.split(",")]
        wanted = [name.strip() for name in names.split(",") if name.strip()]
        return cls(
            variants=tuple(variants([*modes, *wanted])),
            loads=loads,
            model=model,
            rounds=rounds,
            seed=seed,
            threads=threads or usable_cores(),
            turn_s=turn_limit,
            cache=cache,
            out=out,
        )


def run_peers(config: PeersConfig, note: Callable[[str], None]) -> dict[str, Any]:
    """Makes what has to be made, measures, and returns what goes into the file.

    Raises:
        ModelError: the model can't be found or read.
    """
    from worker.model import loader

    files = loader.resolve(config.model, cache_dir=config.cache, dtype="bfloat16", device="cpu", progress=note)
    preparation = Preparation(
        model=config.model,
        directory=files.directory,
        source=loader.find(config.model)[0],
        key=files.digest[:32],
        cache=config.cache,
        threads=config.threads,
        max_running=max(load.count for load in config.loads),
        note=note,
    )
    logs = config.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    plan = Plan(
        variants=config.variants,
        loads=config.loads,
        rounds=config.rounds,
        seed=config.seed,
        vocab_size=files.vocab_size,
        turn_s=config.turn_s,
        logs=logs,
    )
    with ended_by_sigterm():
        results = compare(plan, preparation.prepare, preparation.reference(), note)
    return {"model": {"name": files.name, "digest": files.digest}, "threads": config.threads, **results}


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends what runs inside as Ctrl-C does, so that no peer is left behind."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def write(results: dict[str, Any], out: Path, plot: str, note: Callable[[str], None]) -> None:
    """peers.json and the plot, in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "peers.json").write_text(json.dumps(results, indent=1) + "\n")
    note(f"wrote {out / 'peers.json'}")
    if plot == "none":
        return
    from bench.plot_peers import draw_peers

    try:
        draw_peers(results, title_of(results), out / f"peers.{plot}")
    except ImportError:
        note("no plot without matplotlib: pip install 'octavo[bench]'")
        return
    note(f"wrote {out / f'peers.{plot}'}")


def title_of(results: dict[str, Any]) -> str:
    """What, on what."""
    machine = results["machine"]
    return (
        f"{results['model']['name']}, {results['threads']} threads; {machine['cpu']}, {machine['date'][:10]}\n"
        f"medians of {results['rounds']} rounds, extremes, and ours over each"
    )


def table(results: dict[str, Any]) -> tuple[Sequence[str], list[Sequence[Any]]]:
    """Columns and rows: tokens/s (medians) with ours over theirs, agreement with float32, what failed."""
    loads = [load["name"] for load in results["workloads"]]
    rows: list[Sequence[Any]] = []
    for engine in results["engines"]:
        cells: list[str] = []
        for load in loads:
            found = engine["workloads"][load]
            ratio = found["ours_to_this"]
            cells += [shown(found.get("median")), shown(ratio["median"] if ratio else None, 2)]
        agreed = "-" if engine["agreement"] is None else f"{engine['agreement']:.0%}"
        rows.append((engine["name"], *cells, agreed))
    return ("engine", *(cell for load in loads for cell in (load, "ours/it")), "as float32"), rows


def told(results: dict[str, Any]) -> list[str]:
    """How we stand to the best peer, and which failed, in sentences."""
    lines = []
    for kind, name in (("bf16", "bfloat16 weights"), ("any", "any mode")):
        for load, best in results["best"][kind].items():
            if best is not None:
                lines.append(f"{name}, {load}: {best['ours']} is {best['ratio']:.2f} times {best['peer']}")
    lines += [f"{engine['name']} failed: {engine['failed']}" for engine in results["engines"] if engine["failed"]]
    if results["compared"]["failed"]:
        lines.append(f"no agreement with float32: {results['compared']['failed']}")
    return lines
