"""The table, the page and the plot of a sweep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from bench.routing import Results
from bench.routing_load import HIT_FREE
from bench.routing_plot import axes_of, draw_routing
from bench.routing_report import COLUMNS, cells, markdown, title_of
from tests.unit.bench.routing_made import FACTS, GIVEN_UP, GOOD, RUNS, run

if TYPE_CHECKING:
    from pathlib import Path


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
    given_up = run("random", 1.0, 1.0, GIVEN_UP)
    assert cells(given_up)[5:11] == ("1", "0", "-", "-", "-", "-")
    mixed = run("random", 1.0, 1.0, GOOD, GOOD, GOOD, GIVEN_UP)
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
    pair = [
        run("prefix", 0.0, 0.8, GOOD, GIVEN_UP, kind=HIT_FREE),
        run("least-loaded", 0.0, 0.8, GIVEN_UP, kind=HIT_FREE),
    ]
    draw_routing(results(runs=pair), "a title", tmp_path / "x.svg")
    assert [len(each) for each in heights] == [1, 0] * 4
    assert arrows == [(2.125,), (3.625,)]
