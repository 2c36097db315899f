"""The model that all of the worker's integration tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.tiny_model import save_tiny_llama
from worker import fetch
from worker.break_even import BreakEven

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetching pages always pays, as it would with a larger model, and nobody is hurried on a busy machine."""
    monkeypatch.setattr(BreakEven, "pays", lambda *_: True)
    monkeypatch.setattr(fetch, "LEAST_LIMIT_S", 20.0)
    monkeypatch.setattr(fetch, "LIMIT_S", 20.0)
