"""The picture of a comparison: each workload's throughput by engine, and how ours stands to each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes


def draw_peers(results: dict[str, Any], title: str, path: Path) -> None:
    """One chart per workload; the file's suffix (png, svg) picks the format.

    Raises:
        ImportError: matplotlib is not installed (`pip install octavo[bench]`).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    loads = [load["name"] for load in results["workloads"]]
    measured = [
        engine for engine in results["engines"] if any("median" in each for each in engine["workloads"].values())
    ]
    figure = Figure(figsize=(1 + 3 * len(loads), 1.6 + 0.32 * max(1, len(measured))), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    row = figure.subplots(1, len(loads), squeeze=False, sharey=True)[0]
    for axes, load in zip(row, loads, strict=True):
        _bars(axes, measured, load)
    figure.savefig(path, dpi=120)


def _bars(axes: Axes, engines: list[dict[str, Any]], load: str) -> None:
    """Medians, with the extremes as whiskers; the number is ours over theirs."""
    names = [engine["name"] for engine in engines]
    cells = [engine["workloads"][load] for engine in engines]
    medians = [cell.get("median", 0.0) for cell in cells]
    below = [cell["median"] - cell["least"] if "median" in cell else 0.0 for cell in cells]
    above = [cell["most"] - cell["median"] if "median" in cell else 0.0 for cell in cells]
    places = range(len(names))
    colours = ["tab:blue" if name.startswith("octavo") else "tab:gray" for name in names]
    axes.barh(places, medians, xerr=[below, above], color=colours, error_kw={"lw": 1})
    for place, cell in zip(places, cells, strict=True):
        ratio = cell["ours_to_this"]
        if ratio is not None:
            axes.text(0, place, f" {ratio['median']:.2f}", va="center", fontsize=7, color="white")
    axes.set_yticks(list(places), names, fontsize=8)
    axes.set_title(f"{load}, tokens/s", fontsize=9)
    axes.grid(visible=True, axis="x", alpha=0.3)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
