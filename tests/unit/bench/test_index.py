"""`octavo bench index`: figures from readings, and what the command prints; no broker."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from bench.index import IndexConfig
from bench.index_figures import AIM_LOAD, Reading, index_cells, part, told_aims
from ops.cli import main


def test_a_part_is_the_median_of_its_rounds() -> None:
    """Of 2, 2 and 1 calls: what disturbed one round doesn't count."""
    readings = [Reading(1.0, 2.0), Reading(1.001, 2.002), Reading(1.101, 2.302), Reading(1.1016, 2.303)]
    told = part("step", readings, [0.001, 0.002, 0.003, 0.004, 0.005], tokens=32)
    assert (told.name, told.calls) == ("step", 5)
    assert told.script_us == pytest.approx(600)
    assert told.cpu_us == pytest.approx(1000)
    assert told.p50_ms == pytest.approx(3.0)
    assert told.p90_ms == pytest.approx(4.6)
    assert told.tokens_per_cpu_s == pytest.approx(32_000)
    assert part("other", readings, [0.001] * 5).tokens_per_cpu_s is None
    assert part("free", [Reading(0, 0)] * 2, [0.001], tokens=1).tokens_per_cpu_s is None


def told(name: str, **values: Any) -> dict[str, Any]:
    return {
        "name": name,
        "calls": 5,
        "script_us": 123.4,
        "cpu_us": 234.5,
        "p50_ms": 1.5,
        "p90_ms": 2.0,
        "p99_ms": 3.0,
        "tokens_per_cpu_s": None,
    } | values


def test_lines_of_the_table() -> None:
    assert index_cells(told("a")) == ("a", "123 us", "234 us", "1.50 ms", "2.00 ms", "3.00 ms", "-")
    assert index_cells(told("b", tokens_per_cpu_s=123456.7))[-1] == "123,457"


def test_aims_are_told_reached_or_not() -> None:
    parts = [
        told("a gateway's decision", script_us=1000.0, p50_ms=2.1),
        told("commit", tokens_per_cpu_s=150_000.0),
        told("commit with blocks", tokens_per_cpu_s=99_999.4),
    ]
    load = (
        "The aims are for 100 workers with 2048 blocks each beside the prompt's, prompts of 8192 tokens in 512 blocks, "
        "steps of 32 tokens, one call after the other.\n"
    )
    assert told_aims({**AIM_LOAD, "parts": parts}) == (
        f"{load}"
        "a decision in scripts: 1000 us, aim at most 1000 us: reached\n"
        "a decision at its gateway, p50: 2.10 ms, aim at most 2 ms: missed\n"
        "tokens/s per core: 99,999, aim at least 100,000: missed"
    )
    assert told_aims({**AIM_LOAD, "workers": 3, "parts": parts}) == (
        f"{load}"
        "This was another load, of which they say nothing: 3 workers with 2048 blocks each beside the prompt's, "
        "prompts of 8192 tokens in 512 blocks, steps of 32 tokens.\n"
        "a decision in scripts: 1000 us, aim at most 1000 us\n"
        "a decision at its gateway, p50: 2.10 ms, aim at most 2 ms\n"
        "tokens/s per core: 99,999, aim at least 100,000"
    )


def test_the_aims_are_for_the_default_load() -> None:
    default = IndexConfig()
    assert {
        "workers": default.workers,
        "prompt_tokens": default.prompt_tokens,
        "blocks": default.blocks,
        "held_besides": default.held,
        "step_tokens": default.chunks,
    } == AIM_LOAD


def test_a_prompt_that_fills_no_block_is_refused() -> None:
    assert IndexConfig(prompt_tokens=33).blocks == 2
    result = CliRunner().invoke(main, ["bench", "index", "--prompt-tokens", "15"])
    assert result.exit_code == 2
    assert "--prompt-tokens is less than a block" in result.stderr


def test_a_server_that_is_none_is_told_in_a_line(tmp_path: Any) -> None:
    server = tmp_path / "server"
    server.write_text("#!/bin/sh\nexit 3\n")
    server.chmod(0o755)
    result = CliRunner().invoke(main, ["bench", "index", "--server", str(server)])
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert "did not start" in result.stderr


def test_json_is_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    async def measured(config: IndexConfig, note: Any) -> dict[str, Any]:
        parts = [told("a gateway's decision"), told("c", tokens_per_cpu_s=1.0)]
        return {**AIM_LOAD, "workers": config.workers, "parts": parts}

    monkeypatch.setattr("bench.index.run_index", measured)
    result = CliRunner().invoke(main, ["bench", "index", "--workers", "3", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["workers"] == 3
    result = CliRunner().invoke(main, ["bench", "index"])
    assert "a decision in scripts: 123 us, aim at most 1000 us: reached" in result.stdout
