"""The table, the page and the plot of a sweep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from bench.routing import Results
from bench.routing_figures import ANSWERED, FAILED, UNANSWERED, Sample, Window, summarise
from bench.routing_load import GROUPS, HIT_FREE
from bench.routing_plot import axes_of, draw_routing
from bench.routing_report import COLUMNS, cells, markdown, title_of

if TYPE_CHECKING:
    from pathlib import Path

GOOD = Sample(
    due_s=1.0,
    lag_s=0.002,
    prompt_tokens=100,
    outcome=ANSWERED,
    waited_s=2.0,
    worker="w0",
    cached_tokens=64,
    predicted_tokens=64,
    first_token_s=0.25,
    tokens=((0.25, 1), (0.75, 4)),
)
LOST = Sample(due_s=1.0, lag_s=0.002, prompt_tokens=100, outcome=FAILED, waited_s=2.0, error="UNAVAILABLE: gone")


def run(policy: str, ratio: float, load: float, *samples: Sample, kind: str = GROUPS) -> dict[str, Any]:
    return {
        "scenario": kind if kind != GROUPS else f"ratio {ratio:g}",
        "kind": kind,
        "ratio": ratio,
        "groups": 16,
        "load": load,
        "requests_per_s": 5.0,
        "policy": policy,
        **summarise(samples, Window(0.0, 10.0)).as_dict(),
        "sent": 8,
        "stolen": 2,
        "wall_s": 12.0,
        "client_cpu": 0.1,
    }


RUNS = [
    run("prefix", 2.0, 0.4, GOOD, GOOD),
    run("least-loaded", 2.0, 0.4, GOOD, LOST),
    run("prefix", 2.0, 3.0, GOOD),
    run("least-loaded", 2.0, 3.0),
    run("prefix", 0.0, 0.8, GOOD, kind=HIT_FREE),
]
FACTS: dict[str, Any] = {
    "command": "octavo bench routing --seconds 30",
    "machine": {
        "date": "2026-01-02T03:04:05+00:00",
        "cpu": "A CPU",
        "usable_cores": 2,
        "instruction_sets": ["avx2"],
        "memory_gib": 8.0,
        "load_average": [0.1, 0.2, 0.3],
        "system": "Linux",
        "python": "3.11",
        "packages": {"torch": "2"},
    },
    "model": {"name": "m"},
    "fleet": {
        "workers": 4,
        "kv_tokens": 4096,
        "max_running": 32,
        "device": "cpu",
        "simulated": False,
        "threads_per_worker": 1,
    },
    "config": {
        "model": "smollm2-135m",
        "prefix_tokens": 512,
        "tail_tokens": "32:96",
        "output_tokens": "8",
        "fill_s": 10.0,
        "warm_s": 4.0,
        "seconds": 30.0,
        "drain_s": 5.0,
    },
    "capacity_per_s": 5.125,
    "capacity_measured": True,
}


def results(*, complete: bool = True, runs: list[dict[str, Any]] = RUNS) -> dict[str, Any]:
    return Results(FACTS, list(runs), complete).as_dict()


def test_a_run_is_a_line_of_the_table() -> None:
    assert dict(zip(COLUMNS, cells(RUNS[1]), strict=True)) == {
        "scenario": "ratio 2",
        "load": "0.4",
        "policy": "least-loaded",
        "requests": "2",
        "refused": "0",
        "unanswered": "0",
        "failed": "1",
        "hits": "64.0%",
        "TTFT p50": "0.25 s",
        "p90": "0.25 s",
        "p99": "0.25 s",
        "tokens/s": "10",
        "output tok/s": "0.5",
        "predicted = found": "100.0%",
        "stolen": "25.0%",
        "busiest": "100.0%",
        "lag p99": "2.0 ms",
    }
    assert cells(RUNS[3])[7:11] == ("-", "-", "-", "-")
    given_up = run("random", 1.0, 1.0, Sample(1.0, 0.0, 9, UNANSWERED, 4.0))
    assert cells(given_up)[5:11] == ("1", "0", "-", "-", "-", "-")
    mixed = run("random", 1.0, 1.0, GOOD, GOOD, GOOD, Sample(1.0, 0.0, 9, UNANSWERED, 4.0))
    assert cells(mixed)[8:11] == ("0.25 s", "> 2.88 s", "> 3.89 s")


def test_the_page_has_the_machine_every_run_and_what_is_told() -> None:
    made = results()
    page = markdown(made)
    assert "`octavo bench routing --seconds 30` on 2026-01-02T03:04:05+00:00: A CPU, 2 cores (avx2), 8.0 GiB" in page
    assert "5.12 requests/s (in a closed loop, first)" in page
    assert page.count("\n| ") == len(RUNS) + 2
    assert all(f"- {sentence}\n" in page for sentence in made["told"])
    assert len(made["told"]) == 4
    assert "Interrupted" not in page
    assert "Interrupted: not all runs are here" in markdown(results(complete=False))


def test_title() -> None:
    assert title_of(results()) == (
        "smollm2-135m, 4 workers of 1 thread(s) with pools of 4096 tokens on cpu; A CPU, 2 cores; 2026-01-02\n"
        "prefixes of 512 tokens, tails of 32:96, answers of 8; load 1 is 5.12 requests/s"
    )


def test_what_has_more_values_goes_along_the_charts() -> None:
    assert axes_of(RUNS[:4]) == ("load", "ratio")
    assert axes_of([run("prefix", ratio, 3.0, GOOD) for ratio in (0.5, 1.0)]) == ("ratio", "load")


@pytest.mark.parametrize(
    ("runs", "suffix", "magic"),
    [(RUNS, "png", b"\x89PNG"), (RUNS[:1], "svg", b"<?xml"), (RUNS[4:], "png", b"\x89PNG")],
)
def test_draw(tmp_path: Path, runs: list[dict[str, Any]], suffix: str, magic: bytes) -> None:
    path = tmp_path / f"routing.{suffix}"
    draw_routing(results(runs=runs), "a title", path)
    assert path.read_bytes().startswith(magic)


def test_nothing_is_drawn_of_what_was_not_answered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Bars of an answered run alone, and an arrow on what is more than its bar."""
    from matplotlib.axes import Axes

    heights, arrows = list[list[float]](), list[tuple[float, ...]]()
    bar, plot = Axes.bar, Axes.plot

    def seen_bar(axes: Axes, places: list[float], height: list[float], *rest: Any, **more: Any) -> Any:
        heights.append(list(height))
        return bar(axes, places, height, *rest, **more)

    def seen_plot(axes: Axes, *points: Any, **more: Any) -> Any:
        arrows.append(points[1])
        return plot(axes, *points, **more)

    monkeypatch.setattr(Axes, "bar", seen_bar)
    monkeypatch.setattr(Axes, "plot", seen_plot)
    given_up = Sample(1.0, 0.0, 9, UNANSWERED, 4.0)
    pair = [
        run("prefix", 0.0, 0.8, GOOD, given_up, kind=HIT_FREE),
        run("least-loaded", 0.0, 0.8, given_up, kind=HIT_FREE),
    ]
    draw_routing(results(runs=pair), "a title", tmp_path / "x.svg")
    assert [len(each) for each in heights] == [1, 0] * 4
    assert arrows == [(2.125,), (3.625,)]
