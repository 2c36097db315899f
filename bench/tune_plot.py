"""The picture of `octavo tune`: what each kind of step takes by size of blocks, and what is unused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

COLUMNS = 3
LINES = {"pieces": ":", "fresh": "--", "worn": "-"}
"""By the pool's state."""


def draw_tune(results: dict[str, Any], title: str, path: Path) -> None:
    """One chart for each kind of step and one for waste; the file's suffix (png, svg) picks the format.

    Raises:
        ImportError: matplotlib is not installed (`pip install octavo[bench]`).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    variants = results["variants"]
    steps = variants[0]["steps"]
    rows = len(steps) // COLUMNS + 1
    figure = Figure(figsize=(4 * COLUMNS, 3.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    places = figure.subplots(rows, COLUMNS, squeeze=False).flatten()
    for index, step in enumerate(steps):
        _times(places[index], variants, index)
        _finish(places[index], variants, f"{step['sequences']} x {step['context']} tokens, ms per step")
    _waste(places[len(steps)], variants, results["config"]["most_unused"])
    for spare in places[len(steps) + 1 :]:
        spare.set_axis_off()
    handles, labels = places[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=120)


def _times(axes: Axes, variants: list[dict[str, Any]], index: int) -> None:
    runs = sorted({each["block_run"] for each in variants})
    for run, state in dict.fromkeys((each["block_run"], each["state"]) for each in variants):
        line = [each for each in variants if (each["block_run"], each["state"]) == (run, state)]
        axes.plot(
            [each["block_size"] for each in line],
            [each["steps"][index]["median_ms"] for each in line],
            marker="o",
            markersize=3,
            linestyle=LINES[state],
            color=f"C{runs.index(run)}",
            label=f"runs of {run}, {state}",
        )


def _waste(axes: Axes, variants: list[dict[str, Any]], most_unused: float) -> None:
    unused = {each["block_size"]: 100 * each["unused"] for each in variants}
    axes.plot([*unused], [*unused.values()], marker="o", markersize=3, color="black")
    axes.axhline(100 * most_unused, color="gray", linewidth=1)
    _finish(axes, variants, "slots unused in a mixed load, %")


def _finish(axes: Axes, variants: list[dict[str, Any]], label: str) -> None:
    sizes = sorted({each["block_size"] for each in variants})
    axes.set_title(label, fontsize=9)
    axes.set_xlabel("tokens in a block", fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
