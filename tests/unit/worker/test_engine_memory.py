"""Steps for which there is too little memory: they are tried in parts, and only what fails alone fails."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
import torch

from tests.unit.worker.engine_run import (
    BS,
    Answers,
    engine_of,
    engine_over,
    finish_all,
    prompt_of,
    request,
    run,
    solo,
    step,
)
from tests.unit.worker.paged_model import PagedModel
from worker.sequence import Finish

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker.step import StepRow


def test_running_out_of_memory_together_is_no_reason_to_fail_alone() -> None:
    engine, model = engine_of(most_rows=1)
    asked = [request(f"r{index}", prompt_of(7, seed=index)) for index in range(3)]
    for one in asked:
        engine.add(one)
    answers: Answers = {}
    first = step(engine, answers)
    assert [type(failure).__name__ for failure in first.failures] == ["OutOfMemoryError"] * 2
    assert [len(rows) for rows in model.steps] == [3, 1, 2, 1, 1]
    finish_all(engine, answers)
    assert [answers[one.request_id, 0].said for one in asked] == [solo(one).said for one in asked]


def test_a_prompt_that_is_too_much_at_once_is_computed_in_parts() -> None:
    engine, model = engine_of(most_tokens=5)
    asked = request("a", prompt_of(19), prompt_logprobs=2, logprobs=2)
    (answer,) = run(engine, asked)
    assert answer.said == solo(asked).said
    # Halved in the step, and the steps that follow are smaller.
    assert [len(rows[0].token_ids) for rows in model.steps[:8]] == [19, 9, 4, 15, 7, 3, 12, 6]


def test_steps_shrink_after_running_out_of_memory_and_grow_again() -> None:
    engine, model = engine_of(700, most_tokens=40, context_length=2800)
    engine.add(request("a", prompt_of(2400), max_tokens=1))
    tried: list[int] = []
    while engine.has_work:
        step(engine)
        tried.append(len(model.steps[-1][0].token_ids))
        if len(tried) == 3:
            model.most_tokens = 9999
    assert tried == [32] * 65 + [64] * 5


def test_running_out_of_memory_alone_fails() -> None:
    engine, model = engine_of(most_rows=0)
    answers = run(engine, request("a", prompt_of(3)), request("b", prompt_of(3, seed=1)))
    assert [answer.finish for answer in answers] == [Finish.ERROR] * 2
    assert answers[0].last.error == "OutOfMemoryError: 1 rows of 1 tokens don't fit"
    model.most_rows = 9
    assert run(engine, request("a", prompt_of(3)))[0].finish is Finish.LENGTH


@pytest.mark.parametrize(
    ("failure", "parts"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("not enough memory"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_counts_as_running_out_of_memory(failure: Exception, parts: bool) -> None:
    @dataclass
    class Full(PagedModel):
        def forward(self, rows: Sequence[StepRow]) -> torch.Tensor:
            if len(rows[0].token_ids) > 1:
                raise failure
            return super().forward(rows)

    answer = run(engine_over(Full(8, BS)), request("a", prompt_of(3)))[0]
    assert (answer.finish is Finish.LENGTH) == parts
    assert (answer.finish is Finish.ERROR) != parts


def test_a_failed_passs_tensors_are_gone_before_the_next_is_tried() -> None:
    alive: list[int] = []

    @dataclass
    class Leaky(PagedModel):
        seen: list[weakref.ref[torch.Tensor]] = field(default_factory=list)

        def forward(self, rows: Sequence[StepRow]) -> torch.Tensor:
            alive.append(sum(ref() is not None for ref in self.seen))
            activations = torch.zeros(1000)
            self.seen.append(weakref.ref(activations))
            if len(rows) > 1:
                try:
                    raise torch.OutOfMemoryError("inside")
                except RuntimeError as failure:
                    raise RuntimeError("can't allocate memory") from failure
            return super().forward(rows)

    engine = engine_over(Leaky(64, BS))
    for index in range(4):
        engine.add(request(f"r{index}", prompt_of(5, seed=index)))
    gc.disable()  # nothing may depend on it
    try:
        result = engine.step()
    finally:
        gc.enable()
    assert len(result.failures) == 3
    assert alive == [0] * 7


def test_a_lack_of_memory_is_known_by_its_cause_too() -> None:
    @dataclass
    class Wrapping(PagedModel):
        def forward(self, rows: Sequence[StepRow]) -> torch.Tensor:
            try:
                return super().forward(rows)
            except torch.OutOfMemoryError as error:
                raise RuntimeError("layer 3 failed") from error

    engine = engine_over(Wrapping(64, BS, most_tokens=5))
    (answer,) = run(engine, request("a", prompt_of(19), max_tokens=3))
    assert answer.said == solo(request("a", prompt_of(19), max_tokens=3)).said
