"""The model that all of the worker's integration tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.tiny_model import save_tiny_llama

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))
