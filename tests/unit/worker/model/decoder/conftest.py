from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.worker.model.decoder import models

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory with one of the tiny models, by its name in `models.CONFIGS`; written once."""
    directories: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in directories:
            directories[name] = models.save(models.CONFIGS[name], tmp_path_factory.mktemp("model"))
        return directories[name]

    return get
