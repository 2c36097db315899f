"""Mixed requests through a pool that holds about 4 of them: each finished one equals its solo, cold run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.integration.worker_model.traffic import Answer, Narrow, Sizes, alone, engine_over, requests, together
from tests.unit.worker.model import tiny
from worker.detokenize import TokenBytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.integration.worker_model.conftest import Loaded
    from worker.engine import Engine
    from worker.sequence import Request
    from worker.step import Runner

COUNT, FEW = 200, 60
"""Requests, and those to what takes long for each step: transformers' models, and the real one."""
TINY = Sizes(vocab=tiny.VOCAB, shared=70, own=60, output=16)
TABLE = TokenBytes([b"", b"", b"", *(bytes([40 + token]) for token in range(80)), *[b" \xe2", b"\x82", b"\xac"] * 16])
"""Letters, and pieces of characters of several bytes."""


def compare(crowded: Engine, quiet: Engine, asked: Sequence[Request]) -> None:
    crowd = together(crowded, asked, cancel=0.15, seed=5)
    assert crowd.stats is not None
    assert crowd.stats.blocks_used == 0
    # The test shows something only if all of this happened, and often.
    assert crowd.stats.preemptions > 5
    assert crowd.stats.evictions > len(asked) / 2
    assert crowd.stats.prefix_hit > (2.5 if len(asked) == COUNT else 1.5) * len(asked)  # few meet fewer of their kind
    assert len(asked) / 20 < len(crowd.cancelled) < 0.3 * len(asked)
    finished = 0
    for request in asked:
        expected = alone(quiet, request)
        assert all(answer.finish is not None for answer in expected.values())
        for key, whole in expected.items():
            if request.request_id in crowd.cancelled:
                assert crowd.answers.get(key, Answer()).begins(whole), f"{request}: not a beginning"
            else:
                assert crowd.answers[key] == whole, f"{request} differs from its solo run"
                finished += 1
    assert finished > len(asked)


def eight_bits(directory: Path, dtype: torch.dtype, *, num_blocks: int) -> Runner:
    """On pages of eight bits."""
    return tiny.fused(directory, dtype, num_blocks=num_blocks, eight_bit_pages=True)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("family", "load", "dtype"),
    [
        ("gpt2", tiny.runner, torch.bfloat16),
        ("qwen2", tiny.runner, torch.bfloat16),
        ("gemma3", tiny.runner, torch.bfloat16),
        ("qwen2", tiny.runner, torch.float32),
        ("qwen2", tiny.fused, torch.bfloat16),
        ("gemma3", tiny.fused, torch.bfloat16),
        ("mistral", tiny.fused, torch.bfloat16),
        ("qwen3", tiny.fused, torch.float32),
        ("gemma3", eight_bits, torch.bfloat16),
        ("qwen2", eight_bits, torch.float32),
    ],
    ids=lambda given: getattr(given, "__name__", str(given)),
)
def test_tiny_models(family: str, load: Callable[..., Runner], dtype: torch.dtype, tmp_path: Path) -> None:
    directory = tiny.save(tiny.CONFIGS[family], tmp_path)
    runner = load(directory, dtype, num_blocks=64)
    # Fewer requests need a smaller pool, for all of it to happen often.
    count, blocks = (FEW, 14) if load is tiny.runner else (COUNT, 24)
    crowded, quiet = (
        engine_over(one, TABLE, eos_token_ids=[2], context_length=tiny.CONTEXT)
        for one in (Narrow(runner, blocks), runner)
    )
    compare(crowded, quiet, requests(count, TINY, ["AB", "€ ", "Q"], seed=1))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("smollm2", ["fused"], indirect=True)
def test_smollm2(smollm2: Loaded) -> None:
    files, runner = smollm2(torch.bfloat16)
    table = TokenBytes.from_json(files.tokenizer_json)
    sizes = Sizes(vocab=4000, shared=64, own=20, output=12)
    crowded, quiet = (
        engine_over(one, table, eos_token_ids=files.eos_token_ids, context_length=files.context_length)
        for one in (Narrow(runner, 12), runner)
    )
    compare(crowded, quiet, requests(FEW, sizes, ["the", "\n", "."], seed=2))
