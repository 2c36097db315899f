"""Requests that are cut off anywhere and go on in another engine, on pages that hold nothing: the same to the last bit.

The first engine runs them in a crowd, so that what they had computed when they were cut was in all kinds of batches.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch

from tests.integration.worker_model.test_differential import TABLE, TINY, eight_bits
from tests.integration.worker_model.traffic import Answer, Answers, Narrow, Sizes, alone, engine_over, requests
from tests.unit.worker.model import tiny
from worker.detokenize import TokenBytes
from worker.params import SamplingParams, StopParams
from worker.sequence import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.integration.worker_model.conftest import AnyRunner, Loaded
    from worker.engine import Engine

COUNT, FEW = 60, 16
"""Requests, and those to the real model."""
CROWD = 10
"""Requests at once."""


def cut_off(engine: Engine, asked: Sequence[Request], steps: int) -> tuple[Answers, list[Request]]:
    """What requests say in so many steps, and those that have not ended by then."""
    answers: Answers = {}
    for request in asked:
        engine.add(request)
    for _ in range(steps):
        if engine.has_work:
            take(engine, answers)
    return answers, [request for request in asked if engine.abort(request.request_id)]


def take(engine: Engine, answers: Answers) -> None:
    for output in engine.step().outputs:
        answers.setdefault((output.request_id, output.choice), Answer()).take(output)


def go_on(engine: Engine, asked: Request, answers: Answers) -> None:
    told = {choice: answers.get((asked.request_id, choice), Answer()) for choice in range(asked.n)}
    said = {choice: answer.token_ids for choice, answer in told.items()}
    engine.add(asked, said, {choice for choice, answer in told.items() if answer.finish is not None})


def compare(runner: AnyRunner, make: Callable[..., Engine], asked: list[Request], *, most_steps: int) -> None:
    """``make`` gives an engine over a runner, with an empty pool."""
    chance = random.Random(3)
    expected = {request.request_id: alone(make(runner), request) for request in asked}
    resumed = half_said = 0
    for start in range(0, len(asked), CROWD):
        crowd = asked[start : start + CROWD]
        tiny.poison(runner)
        answers, left = cut_off(make(Narrow(runner, 40)), crowd, chance.randint(1, most_steps))
        half_said += sum(
            any(answers.get((one.request_id, c), Answer()).token_ids for c in range(one.n)) for one in left
        )
        tiny.poison(runner)
        engine = make(runner)
        for request in left:
            go_on(engine, request, answers)
        while engine.has_work:
            take(engine, answers)
            engine.check_integrity()
        for request in crowd:
            for key, whole in expected[request.request_id].items():
                assert answers[key] == whole, f"{request} differs, cut off: {request in left}"
        resumed += len(left)
    # The test shows something only if that happened often.
    assert resumed > len(asked) // 4
    assert half_said > len(asked) // 8


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("family", "load", "dtype"),
    [
        ("qwen2", tiny.runner, torch.bfloat16),
        ("gemma3", tiny.fused, torch.bfloat16),
        ("qwen3", tiny.fused, torch.float32),
        ("gemma3", eight_bits, torch.bfloat16),
    ],
    ids=lambda given: getattr(given, "__name__", str(given)),
)
def test_tiny_models(family: str, load: Callable[..., AnyRunner], dtype: torch.dtype, tmp_path: Path) -> None:
    runner = load(tiny.save(tiny.CONFIGS[family], tmp_path), dtype, num_blocks=64)

    def make(over: AnyRunner) -> Engine:
        return engine_over(over, TABLE, eos_token_ids=[2], context_length=tiny.CONTEXT)

    compare(runner, make, requests(COUNT, TINY, ["AB", "€ ", "Q"], seed=4), most_steps=18)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("smollm2", ["fused"], indirect=True)
def test_smollm2(smollm2: Loaded) -> None:
    files, runner = smollm2(torch.bfloat16)
    table = TokenBytes.from_json(files.tokenizer_json)

    def make(over: AnyRunner) -> Engine:
        return engine_over(over, table, eos_token_ids=files.eos_token_ids, context_length=files.context_length)

    sizes = Sizes(vocab=4000, shared=64, own=20, output=24)
    compare(runner, make, requests(FEW, sizes, ["the", "\n", "."], seed=2), most_steps=20)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("smollm2", ["fused"], indirect=True)
def test_one_long_answer_cut_at_the_edges_of_blocks(smollm2: Loaded) -> None:
    files, runner = smollm2(torch.bfloat16)
    table = TokenBytes.from_json(files.tokenizer_json)
    first, second = (
        engine_over(runner, table, eos_token_ids=files.eos_token_ids, context_length=files.context_length)
        for _ in range(2)
    )
    asked = Request(
        "long",
        tuple(random.Random(5).choices(range(3, 4000), k=37)),
        SamplingParams(temperature=0.9, top_p=0.95, seed=12, frequency_penalty=0.3),
        StopParams(66, ignore_eos=True),
        logprobs=3,
    )
    expected = alone(first, asked)
    for cut in (1, 2, 15, 16, 17, 63):
        answers, left = cut_off(first, [asked], cut)
        tiny.poison(runner)
        for engine in (first, second):
            engine._scheduler.pool.clear()
        assert left == [asked]
        go_on(second, asked, answers)
        while second.has_work:
            take(second, answers)
        assert answers == expected, f"cut off after {cut} steps"
