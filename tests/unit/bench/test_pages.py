"""`octavo bench pages`: its sizes, its figures, and the command; no fleet."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from bench import pages
from bench.pages import COLUMNS, Seen, cells, context_of, small_pool
from ops.child import ChildFailed
from ops.cli import main
from ops.config import FleetConfig


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


def test_what_was_never_fetched_has_no_speed_and_no_length() -> None:
    figures = seen(prompt_tokens=20, fetch_tok_s=0.0, break_even_tokens=0.0, cached_tokens=[0, 0, 0]).figures()
    assert (figures["fetch_tokens_per_s"], figures["break_even_tokens"], figures["ratio"]) == (None, None, None)
    assert cells(figures) == ("dir", "20", "1200 ms", "-", "-", "0", "-", "-", "yes")


def test_what_the_context_has_no_room_for_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def starts(*_: object) -> None:
        raise AssertionError("a fleet was started")

    monkeypatch.setattr(pages, "run_pages", starts)
    monkeypatch.setattr(pages, "context_of", lambda *_: 8192)
    ran = CliRunner().invoke(main, ["bench", "pages", "--lengths", "128,9000"])
    assert ran.exit_code == 2
    assert "prompts of 9000 tokens are longer than the 8188 that smollm2-135m has room for" in ran.output
    with pytest.raises(AssertionError, match="a fleet was started"):
        CliRunner().invoke(main, ["bench", "pages", "--lengths", "8188"], catch_exceptions=False)


def test_a_model_that_is_not_there_is_told_in_a_line() -> None:
    assert context_of(FleetConfig(model="simulated:400,100"), print) == 131072
    ran = CliRunner().invoke(main, ["bench", "pages", "--model", "/nowhere"])
    assert ran.exit_code == 1
    assert ran.output.startswith("Error: ")
    assert "/nowhere" in ran.output


@pytest.mark.parametrize(
    "option", ["--workers=2", "--gateways=2", "--policy=random", "--no-steal", "--kv-tokens=4096", "--pages=redis"]
)
def test_options_that_would_do_nothing_are_none(option: str) -> None:
    ran = CliRunner().invoke(main, ["bench", "pages", option])
    assert ran.exit_code == 2
    assert "No such option" in ran.output


def test_a_server_for_pages_is_refused_where_none_is_used() -> None:
    ran = CliRunner().invoke(main, ["bench", "pages", "--store", "dir", "--pages-redis", "redis://x"])
    assert ran.exit_code == 2
    assert "pages go to a folder with --store dir" in ran.output


def test_a_fleet_that_does_not_start_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object) -> None:
        raise ChildFailed("w0 exited with status 1")

    monkeypatch.setattr(pages, "run_pages", fails)
    ran = CliRunner().invoke(main, ["bench", "pages", "--store", "dir", "--model", "simulated"])
    assert (ran.exit_code, ran.output) == (1, "Error: w0 exited with status 1\n")
