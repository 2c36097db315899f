"""`octavo bench pages`: its sizes, its figures, and the command; no fleet."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from bench import pages
from bench.pages import COLUMNS, Seen, cells, small_pool
from ops.child import ChildFailed
from ops.cli import main


@pytest.mark.parametrize(("length", "pool"), [(12, 32), (13, 48), (1500, 1520), (1501, 1536)])
def test_the_pool_has_room_for_a_prompt_its_answer_and_a_block(length: int, pool: int) -> None:
    assert small_pool(length, 16) == pool


def seen(**changes: object) -> Seen:
    fields = {
        "store": "dir",
        "prompt_tokens": 1500,
        "computed_s": [1.0, 1.2, 5.0],
        "fetched_s": [0.3, 0.2, 0.6],
        "cached_tokens": [1488, 1488, 0],
        "fetch_tok_s": 9000.4,
        "break_even_tokens": 17.6,
        "equal": True,
    }
    return Seen(**(fields | changes))  # type: ignore[arg-type]


def test_medians_are_compared() -> None:
    figures = seen().figures()
    assert figures["computed_first_token_s"] == {"p50": 1.2, "all": [1.0, 1.2, 5.0]}
    assert figures["fetched_first_token_s"]["p50"] == 0.3
    assert figures["ratio"] == 0.25
    assert figures["cached_tokens"] == 1488
    assert cells(figures) == ("dir", "1500", "1200 ms", "300 ms", "0.25", "1488", "9000 tokens", "18 tokens", "yes")
    assert len(cells(figures)) == len(COLUMNS)


def test_what_never_pays_and_what_differs_is_told() -> None:
    figures = seen(break_even_tokens=float("inf"), equal=False).figures()
    assert figures["break_even_tokens"] is None
    assert cells(figures)[-2:] == ("never", "NO")


def test_a_fleet_that_does_not_start_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object) -> None:
        raise ChildFailed("w0 exited with status 1")

    monkeypatch.setattr(pages, "run_pages", fails)
    ran = CliRunner().invoke(main, ["bench", "pages", "--store", "dir"])
    assert (ran.exit_code, ran.output) == (1, "Error: w0 exited with status 1\n")
