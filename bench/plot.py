"""The picture of a run. The only place that imports matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

LATENCIES = (
    ("first_token_s", "time to first token", "s"),
    ("seconds_per_token", "time per output token", "s"),
    ("total_s", "whole answer", "s"),
)


def draw(levels: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Draws throughput and latency over concurrency; the file's suffix (png, svg) picks the format.

    Raises:
        ImportError: matplotlib is not installed (`pip install octavo[bench]`).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(2, 2)
    _throughput(axes[0][0], levels)
    for place, (name, label, unit) in zip((axes[0][1], axes[1][0], axes[1][1]), LATENCIES, strict=True):
        _latency(place, levels, name, f"{label} ({unit})")
    figure.savefig(path, dpi=120)


def _throughput(axes: Axes, levels: Sequence[dict[str, Any]]) -> None:
    concurrency = [level["concurrency"] for level in levels]
    for name, label in (("total_tokens_per_s", "prompt and output"), ("output_tokens_per_s", "output")):
        axes.plot(concurrency, [level[name] for level in levels], marker="o", label=label)
    _finish(axes, concurrency, "tokens per second")


def _latency(axes: Axes, levels: Sequence[dict[str, Any]], name: str, label: str) -> None:
    known = [level for level in levels if level[name] is not None]
    concurrency = [level["concurrency"] for level in known]
    for rank in ("p50", "p90", "p99"):
        axes.plot(concurrency, [level[name][rank] for level in known], marker="o", label=rank)
    _finish(axes, concurrency, label)


def _finish(axes: Axes, concurrency: Sequence[int], label: str) -> None:
    axes.set_title(label, fontsize=9)
    axes.set_xlabel("concurrent requests", fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(concurrency), [str(each) for each in concurrency])
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=8)
