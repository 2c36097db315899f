"""What goes wrong inside a step: only what fails alone fails, and nothing of it is left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    run_choices,
    solo,
    step,
)
from tests.unit.worker.paged_model import NAN, POISON, PagedModel
from worker.params import SamplingParams
from worker.sequence import Finish

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker.step import StepRow


def test_a_poisonous_request_fails_alone_and_is_found_by_halving() -> None:
    engine, model = engine_of()
    good = [request(f"g{index}", prompt_of(7, seed=index)) for index in range(7)]
    for one in (*good[:5], request("bad", [*prompt_of(5, seed=9), POISON, 9]), *good[5:]):
        engine.add(one)
    answers: Answers = {}
    first = step(engine, answers)
    # Eight of them; the halves that went well went on.
    assert [len(rows) for rows in model.steps] == [8, 4, 4, 2, 1, 1, 2]
    assert [type(failure).__name__ for failure in first.failures] == ["PoisonError"] * 4
    assert (first.stats.sequences, first.stats.running) == (8, 7)
    finish_all(engine, answers)
    for one in good:
        assert answers[one.request_id, 0].said == solo(one).said
    failed = answers["bad", 0]
    assert (failed.finish, failed.last.error, failed.token_ids) == (Finish.ERROR, "PoisonError: position 5", [])


def test_a_poisonous_request_alone_in_its_step_fails_without_a_retry() -> None:
    engine, model = engine_of()
    engine.add(request("bad", [*prompt_of(5), POISON]))
    result = step(engine)
    assert [output.finish for output in result.outputs] == [Finish.ERROR]
    assert len(model.steps) == len(result.failures) == 1
    assert not engine.has_work
    assert run(engine, request("good", prompt_of(5)))[0].finish is Finish.LENGTH


def test_a_poisonous_end_of_a_long_prompt_leaves_its_beginning_usable() -> None:
    engine, _ = engine_of(token_budget=8)
    beginning = prompt_of(16)
    (bad,) = run(engine, request("bad", [*beginning, POISON]))
    assert bad.finish is Finish.ERROR
    (good,) = run(engine, request("good", [*beginning, 9]))
    assert good.last.cached_tokens == 16
    assert good.said == solo(request("good", [*beginning, 9])).said


# Copies


def copied_badly(num_blocks: int, *, bad: int) -> PagedModel:
    @dataclass
    class Careless(PagedModel):
        tries: int = 0

        def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
            self.tries += 1
            if any(target == bad for _, target in pairs) or len(pairs) > 2:
                raise RuntimeError("can't copy")
            super().copy_blocks(pairs)

    return Careless(num_blocks, BS)


def test_a_copy_that_fails_ends_only_the_request_that_needs_it() -> None:
    model = copied_badly(32, bad=-1)
    engine = engine_over(model)
    asked = [request(f"r{index}", prompt_of(8, seed=index), max_tokens=3) for index in range(4)]
    expected = [answer.said for answer in run(engine, *asked)]
    # All prompts are cached whole now: each takes a copy of its last block, more than go at once.
    assert [answer.said for answer in run(engine, *asked)] == expected


def test_a_block_that_nothing_was_copied_to_is_not_computed_on() -> None:
    for bad in range(16):
        engine = engine_over(copied_badly(16, bad=bad))
        answers = run_choices(engine, request("a", prompt_of(6), n=3, sampling=SamplingParams(seed=1), max_tokens=4))
        failed = [answer.last.error for answer in answers if answer.finish is Finish.ERROR]
        assert failed in ([], ["RuntimeError: can't copy"] * 3)
        engine.check_integrity()
        again = run(engine, request("b", prompt_of(3, seed=5), max_tokens=2))[0]
        assert again.finish is Finish.LENGTH


# Bad logits


def test_logits_that_are_no_numbers_end_their_row_only() -> None:
    engine, _ = engine_of()
    good = request("good", prompt_of(7))
    bad = request("bad", [*prompt_of(9, seed=1), NAN], logprobs=3)  # E06
    answers = run(engine, good, bad)
    assert answers[0].said == solo(good).said
    assert (answers[1].finish, answers[1].last.error) == (Finish.ERROR, "non-finite logits")


def test_pages_behind_bad_logits_are_offered_to_nobody() -> None:
    engine, _ = engine_of(token_budget=8)
    beginning = prompt_of(12)
    run(engine, request("bad", [*beginning, NAN]))
    assert engine.stats().blocks_cached == 0
    (good,) = run(engine, request("good", [*beginning, 9]))
    assert good.last.cached_tokens == 0


def test_bad_logits_inside_a_prompt_whose_log_probabilities_are_wanted_end_the_request() -> None:
    engine, _ = engine_of(token_budget=4)
    good = request("good", prompt_of(7), prompt_logprobs=0)
    bad = request("bad", [*prompt_of(5, seed=1), NAN, *prompt_of(9, seed=2)], prompt_logprobs=1, n=2)
    engine.add(good)
    engine.add(bad)
    answers = finish_all(engine)
    assert answers["good", 0].said == solo(good).said
    failed = [answers["bad", choice] for choice in range(2)]
    assert [(one.last.error, one.prompt_logprobs) for one in failed] == [("non-finite logits", [])] * 2


@dataclass
class NanAt(PagedModel):
    """Its logits after one position of a row are no numbers; all others are sound."""

    position: int = 0

    def _logits(self, row: StepRow, end: int) -> torch.Tensor:
        logits = super()._logits(row, end)
        return torch.full_like(logits, torch.nan) if end == self.position + 1 else logits


def test_bad_logits_that_only_a_score_sees_end_the_request() -> None:
    engine = engine_over(NanAt(16, BS, position=3))
    (answer,) = run(engine, request("a", prompt_of(9), prompt_logprobs=0))
    assert (answer.finish, answer.last.error, answer.token_ids) == (Finish.ERROR, "non-finite logits", [])
    assert engine.stats().blocks_cached == 0
    # Nobody looks at that position's logits here.
    (answer,) = run(engine, request("b", prompt_of(9), max_tokens=2))
    assert answer.finish is Finish.LENGTH


def test_a_request_that_bans_all_there_is_costs_no_cached_block() -> None:
    @dataclass
    class OneWay(PagedModel):
        def _logits(self, row: StepRow, end: int) -> torch.Tensor:
            logits = torch.full((self.vocab_size,), -torch.inf)
            logits[9] = 0.0
            return logits

    engine = engine_over(OneWay(16, BS))
    run(engine, request("a", prompt_of(9), max_tokens=2))
    cached = engine.stats().blocks_cached
    assert cached == 2
    (answer,) = run(engine, request("b", prompt_of(9), max_tokens=4, min_tokens=2, stop_token_ids=(9,)))
    assert answer.finish is Finish.ERROR
    assert "banned" in answer.last.error
    assert engine.stats().blocks_cached == cached


def test_logits_of_the_wrong_shape_are_the_models_failure() -> None:
    @dataclass
    class Wrong(PagedModel):
        def forward(self, rows: Sequence[StepRow]) -> torch.Tensor:
            return super().forward(rows)[:, :-1]

    (answer,) = run(engine_over(Wrong(8, BS)), request("a", prompt_of(3)))
    assert answer.last.error == "RuntimeError: the model returned logits of shape (1, 63) instead of (1, 64)"
