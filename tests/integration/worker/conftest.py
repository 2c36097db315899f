"""The model that all of the worker's integration tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.embedded import find_server
from tests.integration.conftest import server_binary
from tests.support.tiny_model import save_tiny_llama
from worker import fetch
from worker.break_even import BreakEven

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def broker_binary() -> Path:
    """One kind of server is enough here: what differs between them is tested with kvstore."""
    return find_server()


@pytest.fixture(params=["embedded", "redis"])
def pages_binary(request: pytest.FixtureRequest) -> Path:
    """For servers that pages alone are in, and that tests fill up, freeze or lock: what they say then differs."""
    return server_binary(request.param)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetching pages always pays, as it would with a larger model, and nobody is hurried on a busy machine."""
    monkeypatch.setattr(BreakEven, "pays", lambda *_: True)
    monkeypatch.setattr(fetch, "LEAST_LIMIT_S", 20.0)
    monkeypatch.setattr(fetch, "LIMIT_S", 20.0)
