"""Passes before the first job: what they tell, and what they leave behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from worker.measure import ENOUGH_S, FIRST_PROMPT, SEQUENCES, TIMES, measure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker.step import StepRow

UNTOUCHED = "untouched"


class Clocked:
    """A model that takes just so long (the first pass of a kind longer), and notes what it wrote to."""

    def __init__(self, num_blocks: int = 64, *, step_s: float, sequence_s: float, token_s: float) -> None:
        self.vocab_size = 50
        self.block_size = 16
        self.num_blocks = num_blocks
        self.now = 100.0
        self.passes: list[tuple[int, int]] = []
        self.blocks = [UNTOUCHED] * num_blocks
        self._costs = (step_s, sequence_s, token_s)

    def clock(self) -> float:
        return self.now

    def forward(self, rows: Sequence[StepRow]) -> torch.Tensor:
        tokens = [len(row.token_ids) for row in rows]
        for row in rows:
            assert row.start == 0
            assert row.logits == 1
            assert len(row.block_table) == -(-len(row.token_ids) // self.block_size)
            assert all(0 <= token < self.vocab_size for token in row.token_ids)
            for block in row.block_table:
                self.blocks[block] = "written"
        step_s, sequence_s, token_s = self._costs
        kind = (len(rows), max(tokens))
        prompt = sum(count for count in tokens if count > 1)
        self.now += step_s + sequence_s * (len(rows) - 1) + token_s * prompt
        if kind not in self.passes:
            self.now += 0.001
        self.passes.append(kind)
        return torch.zeros(len(rows), self.vocab_size)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self.blocks[target] = self.blocks[source]


def test_rates_are_those_of_the_model() -> None:
    model = Clocked(step_s=0.004, sequence_s=0.0005, token_s=0.0001)
    found = measure(model, most_tokens=512, clock=model.clock)
    assert found.step_ms == pytest.approx(4.0)
    assert found.sequence_ms == pytest.approx(0.5)
    assert found.prefill_tok_s == pytest.approx(10_000.0)
    longest = max(tokens for _, tokens in model.passes)
    assert longest == 512
    assert model.passes.count((SEQUENCES, 1)) == TIMES
    assert model.blocks == [UNTOUCHED] * 64


def test_a_slow_model_is_not_asked_for_long() -> None:
    model = Clocked(step_s=2.0, sequence_s=0.1, token_s=0.05)
    found = measure(model, most_tokens=512, clock=model.clock)
    assert model.passes == [(1, 1), (SEQUENCES, 1), (1, FIRST_PROMPT)]
    assert found.step_ms == pytest.approx(2001.0)
    assert found.prefill_tok_s == pytest.approx(20.0)


def test_a_longer_prompt_only_after_a_fast_one() -> None:
    model = Clocked(step_s=0.001, sequence_s=0.0, token_s=0.001)
    measure(model, most_tokens=512, clock=model.clock)
    longest = max(tokens for _, tokens in model.passes)
    assert longest * 0.001 >= ENOUGH_S > longest / 2 * 0.001


def test_sequences_that_cost_nothing_have_a_rate() -> None:
    model = Clocked(step_s=0.01, sequence_s=0.0, token_s=0.0)
    found = measure(model, most_tokens=64, clock=model.clock)
    assert 0 < found.sequence_ms < 0.01
    assert found.prefill_tok_s == pytest.approx(64 / 0.001)  # a tenth of the step, at least, is the prompt's


def test_a_small_pool_is_enough() -> None:
    model = Clocked(2, step_s=0.01, sequence_s=0.001, token_s=0.001)
    found = measure(model, most_tokens=512, clock=model.clock)
    assert set(model.passes) == {(1, 1), (1, 16)}
    assert found.prefill_tok_s == pytest.approx(1000.0)
    assert model.blocks == [UNTOUCHED] * 2
    with pytest.raises(ValueError, match="one block"):
        measure(Clocked(1, step_s=0.01, sequence_s=0.001, token_s=0.001), most_tokens=512)
