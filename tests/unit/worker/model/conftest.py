from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.worker.model import tiny

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from worker.model.hf import HfRunner


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory with each of the tiny models."""
    return {name: tiny.save(config, tmp_path_factory.mktemp(name)) for name, config in tiny.CONFIGS.items()}


@pytest.fixture(scope="session")
def loaded(models: dict[str, Path]) -> Callable[[str, torch.dtype], HfRunner]:
    """A runner for a family and dtype, loaded once, with pages that all hold NaN."""
    runners: dict[tuple[str, torch.dtype], HfRunner] = {}

    def get(family: str, dtype: torch.dtype) -> HfRunner:
        if (family, dtype) not in runners:
            runners[family, dtype] = tiny.runner(models[family], dtype)
        tiny.poison(runners[family, dtype])
        return runners[family, dtype]

    return get
