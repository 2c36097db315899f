"""A prompt whose hidden states are not finite fails alone: nobody finds its blocks, in the same step or later."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.integration.worker_model.traffic import alone, engine_over
from tests.unit.worker.model import tiny
from worker.detokenize import TokenBytes
from worker.model.decoder.runner import DecoderRunner
from worker.params import SamplingParams, StopParams
from worker.sequence import Finish, Request

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from worker.model.hf import HfRunner
    from worker.step import Output

SICK = 77
TABLE = TokenBytes([bytes([token]) for token in range(tiny.VOCAB)])


def request(name: str, prompt: list[int], **options: int) -> Request:
    return Request(name, tuple(prompt), SamplingParams(temperature=0.0), StopParams(6, ignore_eos=True), **options)


@pytest.mark.parametrize("load", [tiny.runner, tiny.fused])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("length", "at"),
    [
        (30, 20),  # its logits tell
        (100, 20),  # its first chunk asks for no logits, and the blocks before the sick token are in the same tile
        (100, 90),  # the first chunk is sound, and stays cached
    ],
)
def test_nobody_else_notices(
    load: Callable[..., HfRunner | DecoderRunner], dtype: torch.dtype, length: int, at: int, tmp_path: Path
) -> None:
    runner = load(tiny.save(tiny.CONFIGS["llama"], tmp_path), dtype, num_blocks=64)
    with torch.no_grad():
        if isinstance(runner, DecoderRunner):
            runner.model.embedding[SICK] = torch.nan
        else:
            runner.model.get_input_embeddings().weight[SICK] = torch.nan
    engine = engine_over(runner, TABLE, eos_token_ids=[], context_length=tiny.CONTEXT)
    ids = [token if token != SICK else 0 for token in tiny.tokens(100)]
    sick = [*ids[:at], SICK, *ids[at + 1 : length]]
    well = [request("with it", ids[:16] + tiny.tokens(9, 1)), request("after it", ids[:19] + tiny.tokens(9, 2))]
    well += [request("scored", ids[:70], prompt_logprobs=1)]
    expected = {one.request_id: alone(engine, one)[one.request_id, 0] for one in well}
    engine._scheduler.pool.clear()
    engine.add(request("sick", sick))
    engine.add(well[0])
    outputs: list[Output] = []
    for later in well[1:]:
        while engine.has_work:
            outputs += engine.step().outputs
            engine.check_integrity()
        engine.add(later)
    while engine.has_work:
        outputs += engine.step().outputs
    ends = {output.request_id: output for output in outputs if output.finish is not None}
    assert ends["sick"].finish is Finish.ERROR
    assert "not finite" in ends["sick"].error or "non-finite" in ends["sick"].error
    for one in well:
        found = [output for output in outputs if output.request_id == one.request_id]
        assert [token for output in found for token in output.token_ids] == expected[one.request_id].token_ids
        scores = [score for output in found for score in output.prompt_logprobs]
        assert scores == expected[one.request_id].prompt_logprobs
    assert engine.stats().blocks_used == 0
