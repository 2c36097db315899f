"""Gateways that say nothing for longer than clients wait for them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bench.chaos.evidence import Rules
from bench.chaos.run import run_chaos
from bench.chaos.schedule import Kind
from tests.integration.chaos.test_run import CONFIG, SETTINGS

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.timeout(240)
async def test_gateways_that_stand_still_are_left_in_time(tmp_path: Path) -> None:
    """Also by the product's client, which has to find out by itself."""
    kinds = (Kind.GATEWAY_FREEZE, Kind.GATEWAY_CUT)
    slow = replace(SETTINGS, model="simulated:2000,40")
    habits = replace(CONFIG.habits, deadline_s=60.0, bad=0.0)
    config = replace(
        CONFIG, seed=22, seconds=60.0, tokens=(24, 96), kinds=kinds, every_s=3.0, habits=habits, rules=Rules()
    )
    report = await run_chaos(config, slow, tmp_path, lambda _: None, print)
    done = [each.fault for each in report.struck if each.done]
    longest = {kind: max((fault.duration_s for fault in done if fault.kind is kind), default=0.0) for kind in kinds}
    assert min(longest.values()) > 15.0, "clients wait for 15 s"
    assert report.findings == [], str(report)
    assert report.figures.merged > 40
    assert report.figures.accepted == report.figures.finished + report.figures.cancelled > 120
