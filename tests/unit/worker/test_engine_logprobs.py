"""Log-probabilities of output and prompt: one for each token, whatever was cached, chunked or preempted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from tests.unit.worker.engine_run import (
    BS,
    Answers,
    engine_of,
    engine_over,
    finish_all,
    forced,
    ids,
    prompt_of,
    request,
    run,
    run_choices,
    solo,
    step,
)
from tests.unit.worker.paged_model import VOCAB, Forced, PagedModel
from worker.params import SamplingParams
from worker.step import StepRow

if TYPE_CHECKING:
    from worker.sampling.draw import TokenLogprobs


def by_the_model(token_ids: list[int], start: int, top: int) -> list[tuple[int, float, list[tuple[int, float]]]]:
    """What the model itself thinks of the tokens from ``start`` on, each after all before it."""
    model = PagedModel(64, BS)
    table = list(range(-(-len(token_ids) // BS)))
    logits = model.forward([StepRow(token_ids, 0, table, len(token_ids))])
    expected = []
    for position in range(start, len(token_ids)):
        row = torch.log_softmax(logits[position - 1].double(), -1)
        possible = [token for token in range(VOCAB) if math.isfinite(row[token])]
        order = sorted(possible, key=lambda token: (-logits[position - 1, token].item(), token))
        likeliest = [(token, row[token].item()) for token in order[:top]]
        expected.append((token_ids[position], row[token_ids[position]].item(), likeliest))
    return expected


def check(got: list[TokenLogprobs], expected: list[tuple[int, float, list[tuple[int, float]]]]) -> None:
    assert [one.token_id for one in got] == [token for token, _, _ in expected]
    assert [one.logprob for one in got] == pytest.approx([logprob for _, logprob, _ in expected], abs=1e-5)
    for one, (_, _, top) in zip(got, expected, strict=True):
        assert [token for token, _ in one.top] == [token for token, _ in top]
        assert [logprob for _, logprob in one.top] == pytest.approx([logprob for _, logprob in top], abs=1e-5)


@pytest.mark.parametrize("top", [0, 1, 5, VOCAB])
def test_each_output_token_has_its_own(top: int) -> None:  # C15, E01
    sampling = SamplingParams(temperature=1.5, seed=3, frequency_penalty=1.0, logit_bias=((9, 3.0),))
    prompt = prompt_of(7)
    (answer,) = run(engine_of()[0], request("a", prompt, max_tokens=12, sampling=sampling, logprobs=top))
    assert all(len(output.logprobs) == 1 for output in answer.outputs)
    check(answer.logprobs, by_the_model([*prompt, *answer.token_ids], len(prompt), top))


def test_a_held_back_text_holds_no_log_probability_back() -> None:  # E01
    asked = request("a", prompt_of(5), stop=("bcdx",), logprobs=2)
    (answer,) = run(forced(ids(" abcdefg")), asked)
    assert [output.logprobs[0].token_id for output in answer.outputs] == answer.token_ids


def test_none_are_given_that_were_not_asked_for() -> None:
    (answer,) = run(engine_of()[0], request("a", prompt_of(7)))
    assert (answer.logprobs, answer.prompt_logprobs) == ([], [])


@pytest.mark.parametrize("length", [1, 2, BS, BS + 1, 2 * BS, 2 * BS + 1, 40])
@pytest.mark.parametrize("chunk", [1, 3, 4, 64])
def test_each_prompt_token_but_the_first_has_its_own(length: int, chunk: int) -> None:
    prompt = prompt_of(length)
    asked = request("a", prompt, max_tokens=3, prompt_logprobs=2)
    (answer,) = run(engine_of(token_budget=chunk)[0], asked)
    check(answer.prompt_logprobs, by_the_model(prompt, 1, 2))
    assert answer.said == solo(asked).said


@pytest.mark.parametrize("length", [BS + 1, 2 * BS, 2 * BS + 1])
def test_a_cached_prompt_is_scored_as_a_cold_one(length: int) -> None:  # E04
    engine, _ = engine_of()
    asked = request("a", prompt_of(length), max_tokens=3, prompt_logprobs=1, logprobs=1)
    run(engine, request("warm", asked.prompt, max_tokens=3))
    first, second = run(engine, asked)[0], run(engine, asked)[0]
    assert first.said == second.said == solo(asked).said
    assert first.last.cached_tokens == second.last.cached_tokens == 0


def test_overlapping_prompts_are_scored_alike_in_any_order() -> None:  # E05
    shared = prompt_of(12)
    one = request("a", [*shared, 5, 6, 7], max_tokens=2, prompt_logprobs=1)
    two = request("b", [*shared, 8, 9], max_tokens=2, prompt_logprobs=1)
    there = run(engine_of()[0], one, two)
    back = run(engine_of()[0], two, one)
    assert [answer.said for answer in there] == [answer.said for answer in reversed(back)]
    assert there[0].said == solo(one).said


def test_a_preempted_prompt_is_scored_once_and_told_once() -> None:
    """Preempted in the middle of the prompt, and in the middle of the answer."""
    engine, model = engine_of(num_blocks=12, token_budget=8, max_running=4)
    long = [request(f"l{index}", prompt_of(4, seed=index), max_tokens=30) for index in range(2)]
    asked = request("a", prompt_of(30, seed=7), max_tokens=8, prompt_logprobs=3, logprobs=1, n=2)
    answers: Answers = {}
    for one in (*long, asked):
        engine.add(one)
    finish_all(engine, answers)
    assert engine.stats().preemptions > 0
    assert [answers["a", choice].said for choice in range(2)] == [
        answer.said for answer in run_choices(engine_of(256, token_budget=999)[0], asked)
    ]
    # Each position was scored in one pass only, whatever was computed again.
    scored = sum(row.logits for rows in model.steps for row in rows)
    drawn = sum(len(answer.token_ids) for answer in answers.values()) - 1  # one row for the first tokens of both
    assert scored - drawn == 29


def test_they_come_whole_with_the_first_token() -> None:
    engine, _ = engine_of(token_budget=4)
    engine.add(request("a", prompt_of(10), max_tokens=2, prompt_logprobs=0, n=2))
    outputs = [output for _ in range(4) for output in engine.step().outputs]
    assert [(output.choice, output.start, len(output.prompt_logprobs)) for output in outputs] == [
        (0, 0, 9),
        (1, 0, 0),
        (0, 1, 0),
        (1, 1, 0),
    ]


def test_many_rows_of_logits_are_spread_over_steps() -> None:
    engine, model = engine_of(400, token_budget=999, context_length=1600)
    asked = request("a", prompt_of(300), max_tokens=2, prompt_logprobs=1)
    engine.add(asked)
    answers: Answers = {}
    while engine.has_work:
        step(engine, answers)
    assert max(sum(row.logits for row in rows) for rows in model.steps) <= 129
    assert len(answers["a", 0].prompt_logprobs) == 299
    assert all(math.isfinite(one.logprob) for one in answers["a", 0].prompt_logprobs)


def test_a_script_is_certain() -> None:
    """Of the stand-in model: what it is forced to say has nearly all the probability."""
    (answer,) = run(engine_over(Forced(8, BS, script=[[9]])), request("a", prompt_of(5), max_tokens=1, logprobs=1))
    assert answer.logprobs[0].logprob == pytest.approx(0.0, abs=1e-6)
    assert answer.logprobs[0].top[0][0] == 9
