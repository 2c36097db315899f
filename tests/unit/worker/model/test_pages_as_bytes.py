"""What leaves a pool as bytes and comes back, into other blocks and another runner, is the same to the last bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.unit.worker.kernels.native import NATIVE
from tests.unit.worker.model import tiny
from tests.unit.worker.model.tiny import BLOCK, CONFIGS, Text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from worker.model.decoder.runner import DecoderRunner
    from worker.model.hf import HfRunner

    AnyRunner = HfRunner | DecoderRunner
    Loaded = Callable[[str, torch.dtype], HfRunner]

DTYPES = (torch.float32, torch.bfloat16)
FIRST, SECOND = [3, 1, 9, 4], [70, 20, 33, 5]


def moved(source: AnyRunner, target: AnyRunner, poison: Callable[[], None]) -> None:
    """Three blocks' pages go from one to the other; the logits on them are those without a detour."""
    ids = tiny.tokens(3 * BLOCK + 10)
    cold = tiny.feed(source, Text(ids, FIRST), 3 * BLOCK, 5)
    payloads = source.read_blocks(FIRST[:3])
    assert [len(payload) for payload in payloads] == [source.page_bytes] * 3
    poison()
    target.write_blocks(SECOND[:3], [memoryview(payload) for payload in payloads])
    assert target.read_blocks(SECOND[:3]) == payloads
    warm = tiny.feed(target, Text(ids, SECOND, done=3 * BLOCK), 5)
    for length, logits in warm.logits.items():
        assert torch.equal(logits, cold.logits[length]), length
    assert source.page_layout == target.page_layout
    with pytest.raises(ValueError, match="bytes"):
        target.write_blocks([0, 1], [payloads[0], payloads[1][:-1]])
    assert target.read_blocks(SECOND[:3]) == payloads
    target.write_blocks([], [])


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_torchs_pages(family: str, dtype: torch.dtype, loaded: Loaded) -> None:
    runner = loaded(family, dtype)
    moved(runner, runner, lambda: tiny.poison(runner))


@pytest.mark.skipif(not NATIVE, reason="no compiler was found when the package was installed")
@pytest.mark.parametrize("eight_bit", [False, True], ids=["auto", "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_the_fused_decoders_pages(family: str, dtype: torch.dtype, eight_bit: bool, models: dict[str, Path]) -> None:
    source, target = (tiny.fused(models[family], dtype, eight_bit_pages=eight_bit) for _ in range(2))
    moved(source, target, lambda: tiny.poison(source))


@pytest.mark.skipif(not NATIVE, reason="no compiler was found when the package was installed")
def test_layouts_tell_dtypes_apart(models: dict[str, Path], loaded: Loaded) -> None:
    made = [
        tiny.fused(models["llama"], torch.bfloat16),
        tiny.fused(models["llama"], torch.float32),
        tiny.fused(models["llama"], torch.float32, eight_bit_pages=True),
        loaded("llama", torch.float32),
        loaded("llama", torch.bfloat16),
    ]
    assert len({runner.page_layout for runner in made}) == len(made)
