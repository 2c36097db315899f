"""`octavo bench peers`: from options to results, and what is written and printed of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.output import write_json, write_plot
from bench.peers.catalog import OURS, PEERS, Variant, variants
from bench.peers.compare import Plan, compare
from bench.peers.prepare import Preparation
from bench.peers.results import Asked
from ops.config import usable_cores
from ops.console import ended_by_sigterm

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.offline import Load


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
    check: bool
    """Whether only to see if everything runs."""

    @classmethod
    def of(
        cls,
        *,
        names: str,
        modes: str,
        ours: str,
        loads: tuple[Load, ...],
        model: str,
        rounds: int,
        seed: int,
        threads: int | None,
        turn_limit: float,
        cache: Path,
        out: Path,
        check: bool,
    ) -> PeersConfig:
        """From options. Raises ValueError for an unknown peer or mode, and without a mode of ours."""
        if not _split(ours):
            raise ValueError(f"--ours names no mode of ours to compare with; there are {', '.join(PEERS[OURS].modes)}")
        mine = variants([f"{OURS}:{mode}" for mode in _split(ours)])
        theirs = variants(_split(names), _split(modes)) if _split(names) else []
        return cls(
            variants=tuple({each.name: each for each in (*mine, *theirs)}.values()),
            loads=loads,
            model=model,
            rounds=1 if check else rounds,
            seed=seed,
            threads=threads or usable_cores(),
            turn_s=turn_limit,
            cache=cache,
            out=out / "check" if check else out,
            check=check,
        )


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def reduced(load: Load) -> Load:
    """The same kind of workload, small enough to see in seconds whether it runs."""
    return replace(load, count=min(4, load.count), shared=load.shared // 8, own=load.own // 4, new=load.new // 8)


def run_peers(config: PeersConfig, note: Callable[[str], None]) -> dict[str, Any]:
    """Makes what has to be made, measures, and returns what goes into the file, which is written after each round.

    Ctrl-C and SIGTERM end it with what was measured until then.

    Raises:
        KeyboardInterrupt: that was nothing.
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
    loads = [reduced(load) for load in config.loads] if config.check else config.loads
    asked = Asked(config.variants, loads, config.rounds, config.seed)
    plan = Plan(asked, vocab_size=files.vocab_size, turn_s=config.turn_s, logs=logs)

    def whole(results: dict[str, Any]) -> dict[str, Any]:
        return {"model": {"name": files.name, "digest": files.digest}, "threads": config.threads, **results}

    def keep(results: dict[str, Any]) -> None:
        write_json(whole(results), config.out / "peers.json")

    with ended_by_sigterm():
        return whole(compare(plan, preparation.prepare, preparation.reference(), note, keep))


def write(results: dict[str, Any], out: Path, plot: str, note: Callable[[str], None]) -> None:
    """peers.json and the plot, in `out`."""
    write_json(results, out / "peers.json")
    note(f"wrote {out / 'peers.json'}")
    if plot == "none":
        return
    from bench.plot_peers import draw_peers

    write_plot(partial(draw_peers, results, title_of(results)), out / f"peers.{plot}")
    note(f"wrote {out / f'peers.{plot}'}")


def title_of(results: dict[str, Any]) -> str:
    """What, on what."""
    machine = results["machine"]
    upto = "at most " if results["interrupted"] else ""
    return (
        f"{results['model']['name']}, {results['threads']} threads; {machine['cpu']}, {machine['date'][:10]}\n"
        f"medians of {upto}{results['rounds']} rounds, extremes, and ours over each"
    )
