"""Whole fleets, started by the installed command, on the real model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.e2e.harness import Up

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the fleet's batches."""
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="session")
def fleet(batches: Path) -> Iterator[Up]:
    """Two gateways, with HTTP and batches, and two workers on the real model, for tests that leave the fleet as they
    found it."""
    sizes = ("--gateways", "2", "--workers", "2", "--http-port", "0", "--grace", "5")
    up = Up.start(*sizes, OCTAVO_BATCHES=str(batches))
    try:
        yield up.until_ready()
    finally:
        status = up.stop()
    assert status == 0, "\n".join(up.said)


@pytest.fixture(scope="session")
def narrow() -> Iterator[Up]:
    """One worker with room for two sequences and 1,024 tokens: limits are near."""
    up = Up.start("--workers", "1", "--max-running", "2", "--kv-tokens", "1024", "--grace", "5")
    try:
        yield up.until_ready()
    finally:
        status = up.stop()
    assert status == 0, "\n".join(up.said)


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of whoever runs the tests must not reach the fleets."""
    for name in [name for name in os.environ if name.startswith("OCTAVO_") and name != "OCTAVO_CACHE"]:
        monkeypatch.delenv(name)
