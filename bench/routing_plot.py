"""The picture of a sweep of policies: hits, latency and throughput over working sets or loads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bench.routing_load import GROUPS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

Run = dict[str, Any]
FIGURES: Final[tuple[tuple[str, Callable[[Run], float | None], str], ...]] = (
    ("prompt tokens found in a cache, %", lambda run: None if run["hit_rate"] is None else 100 * run["hit_rate"], ""),
    ("time to first token, p50 (s)", lambda run: run["first_token_s"] and run["first_token_s"]["p50"], "p50"),
    ("time to first token, p90 (s)", lambda run: run["first_token_s"] and run["first_token_s"]["p90"], "p90"),
    ("prompt and output tokens per second", lambda run: run["tokens_per_s"] or None, ""),
)
"""Titles, what is drawn of a run (None: nothing), and the figure of the time to first token that it is."""


def draw_routing(results: dict[str, Any], title: str, path: Path) -> None:
    """One row of charts for each load over ratios, or for each ratio over loads, and one of bars for what has neither;
    the file's suffix (png, svg) picks the format.

    Raises:
        ImportError: matplotlib is not installed (`pip install octavo[bench]`).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    policies = list(dict.fromkeys(run["policy"] for run in results["runs"]))
    grouped = [run for run in results["runs"] if run["kind"] == GROUPS]
    special = [run for run in results["runs"] if run["kind"] != GROUPS]
    over, each = axes_of(grouped)
    rows = sorted({run[each] for run in grouped})
    count = len(rows) + bool(special)
    figure = Figure(figsize=(4 * len(FIGURES), 0.8 + 3.2 * count), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    places = figure.subplots(count, len(FIGURES), squeeze=False)
    for row, value in zip(places, rows, strict=False):
        shown = [run for run in grouped if run[each] == value]
        for axes, (label, read, rank) in zip(row, FIGURES, strict=True):
            _lines(axes, shown, policies, over, read)
            _open_ended(axes, [(run[over], read(run)) for run in shown if _is_more(run, rank)])
            axes.set_title(f"{label}, {each} {value:g}", fontsize=9)
    if special:
        for axes, (label, read, rank) in zip(places[-1], FIGURES, strict=True):
            _bars(axes, special, policies, read, rank)
            axes.set_title(label, fontsize=9)
    places[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def axes_of(runs: Sequence[Run]) -> tuple[str, str]:
    """What goes along the charts, and what each row of them has one of: whichever has more values goes along."""
    ratios, loads = ({run[name] for run in runs} for name in ("ratio", "load"))
    return ("ratio", "load") if len(ratios) >= len(loads) else ("load", "ratio")


def _lines(
    axes: Axes, runs: Sequence[Run], policies: Sequence[str], over: str, read: Callable[[Run], float | None]
) -> None:
    for index, policy in enumerate(policies):
        points = sorted((run[over], read(run)) for run in runs if run["policy"] == policy and read(run) is not None)
        axes.plot(*zip(*points, strict=True) if points else ((), ()), marker="o", color=f"C{index}", label=policy)
    values = sorted({run[over] for run in runs})
    axes.set_xlabel("working set / pool" if over == "ratio" else "load", fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{each:g}" for each in values])
    axes.minorticks_off()
    _finish(axes)


def _is_more(run: Run, rank: str) -> bool:
    return run["first_token_s"] is not None and rank in run["first_token_at_least"]


def _open_ended(axes: Axes, points: Sequence[tuple[float, float | None]]) -> None:
    """A triangle on what is more than where it is drawn: it lies among those who were given up."""
    if points:
        label = "at least: among the unanswered"
        axes.plot(*zip(*points, strict=True), marker="^", markersize=8, linestyle="", color="k", label=label)
        axes.legend(fontsize=7)


def _bars(
    axes: Axes, runs: Sequence[Run], policies: Sequence[str], read: Callable[[Run], float | None], rank: str
) -> None:
    names = list(dict.fromkeys((run["scenario"], run["load"]) for run in runs))
    width = 0.8 / len(policies)
    for index, policy in enumerate(policies):
        found = [(names.index((run["scenario"], run["load"])), run) for run in runs if run["policy"] == policy]
        shift = (index - (len(policies) - 1) / 2) * width
        drawn = [(place + shift, height, run) for place, run in found if (height := read(run)) is not None]
        axes.bar([each[0] for each in drawn], [each[1] for each in drawn], width, color=f"C{index}", label=policy)
        _open_ended(axes, [(place, height) for place, height, run in drawn if _is_more(run, rank)])
    axes.set_xticks(range(len(names)), [f"{name}\nload {load:g}" for name, load in names], fontsize=8)
    _finish(axes)


def _finish(axes: Axes) -> None:
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
