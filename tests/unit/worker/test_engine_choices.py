"""Several choices of one request: one prompt, each its own answer and its own end."""

from __future__ import annotations

import pytest

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
    solo_choices,
    step,
)
from tests.unit.worker.paged_model import EOS, NAN, POISON, VOCAB, Forced
from worker.params import SamplingParams
from worker.sequence import Finish

SAMPLED = SamplingParams(temperature=1.5, seed=11)


def test_the_prompt_is_computed_once_and_shared() -> None:
    engine, model = engine_of()
    engine.add(request("a", prompt_of(10), n=4, sampling=SAMPLED))
    first = step(engine)
    assert [(row.start, len(row.token_ids), row.logits) for row in model.steps[0]] == [(0, 10, 1)]
    assert [(output.choice, output.start, len(output.token_ids)) for output in first.outputs] == [
        (choice, 0, 1) for choice in range(4)
    ]
    assert (first.stats.running, first.stats.blocks_used) == (4, 3)
    second = step(engine)
    assert [(row.start, len(row.token_ids)) for row in model.steps[1]] == [(10, 1)] * 4
    # Two full blocks are shared; of the third, which is partly filled, each choice has its own.
    tables = [row.block_table for row in model.steps[1]]
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({table[2] for table in tables}) == 4
    assert second.stats.blocks_used == 6


def test_choices_differ_and_can_be_had_again() -> None:  # C11
    asked = request("a", prompt_of(9), n=4, sampling=SAMPLED, max_tokens=12, logprobs=2)
    answers = run_choices(engine_of()[0], asked)
    assert len({tuple(answer.token_ids) for answer in answers}) == 4
    assert [answer.said for answer in run_choices(engine_of()[0], asked)] == [answer.said for answer in answers]
    one = run(engine_of()[0], request("a", prompt_of(9), sampling=SAMPLED, max_tokens=12, logprobs=2))[0]
    assert one.said == answers[0].said


@pytest.mark.parametrize("max_running", [1, 2, 3, 8])
@pytest.mark.parametrize("num_blocks", [6, 9, 64])
def test_choices_in_any_company_equal_those_that_are_alone(num_blocks: int, max_running: int) -> None:
    asked = [
        request(
            f"r{index}",
            prompt_of(7 + index),
            n=1 + index,
            sampling=SamplingParams(temperature=1.0, seed=index, frequency_penalty=0.5 * index),
            max_tokens=7,
            ignore_eos=False,
            logprobs=1,
            prompt_logprobs=1 if index == 2 else None,
        )
        for index in range(4)
    ]
    engine, _ = engine_of(num_blocks, max_running=max_running)
    for one in asked:
        engine.add(one)
    answers = finish_all(engine)
    for one in asked:
        assert [answers[one.request_id, choice].said for choice in range(one.n)] == [
            answer.said for answer in solo_choices(one)
        ]


def test_each_choice_ends_by_itself() -> None:
    """At choice 0's end the others go on; the last one ends the request."""
    sampling = SamplingParams(temperature=1.0, seed=5)
    script = [[token, *[12] * (token % 5), EOS] for token in range(4, 64)]
    engine = engine_over(Forced(64, BS, script=script))
    asked = request("a", prompt_of(5), n=6, max_tokens=20, ignore_eos=False, sampling=sampling)
    answers = run_choices(engine, asked)
    assert all(answer.finish is not None for answer in answers)
    assert len({len(answer.token_ids) for answer in answers}) > 2
    assert not engine.has_work


def test_choices_that_end_with_their_first_token() -> None:
    engine = forced([EOS])
    answers = run_choices(engine, request("a", prompt_of(5), n=3, ignore_eos=False))
    assert [(answer.token_ids, answer.finish) for answer in answers] == [([EOS], Finish.STOP)] * 3
    assert engine.stats().blocks_used == 0


def test_penalties_count_each_choices_own_tokens() -> None:
    sampling = SamplingParams(temperature=1.0, seed=2, frequency_penalty=2.0, repetition_penalty=1.5)
    asked = request("a", prompt_of(6), n=3, sampling=sampling, max_tokens=20)
    assert [one.said for one in run_choices(engine_of(9, max_running=2)[0], asked)] == [
        one.said for one in solo_choices(asked)
    ]


def test_cached_and_prompt_tokens_are_the_requests() -> None:
    engine, _ = engine_of()
    run(engine, request("warm", prompt_of(9)))
    answers = run_choices(engine, request("a", prompt_of(9), n=3, sampling=SAMPLED, max_tokens=2))
    assert [(one.last.cached_tokens, one.last.prompt_tokens, one.last.completion_tokens) for one in answers] == [
        (8, 9, 2)
    ] * 3


@pytest.mark.parametrize("moment", range(7))
def test_an_abort_ends_all_choices(moment: int) -> None:
    engine, _ = engine_of(9, token_budget=4, max_running=3)
    engine.add(request("a", prompt_of(9), n=5, sampling=SAMPLED))
    engine.add(request("b", prompt_of(5, seed=1)))
    answers: Answers = {}
    for _ in range(moment):
        step(engine, answers)
    assert engine.abort("a")
    engine.check_integrity()
    told = sum(len(answer.outputs) for (name, _), answer in answers.items() if name == "a")
    finish_all(engine, answers)
    assert sum(len(answer.outputs) for (name, _), answer in answers.items() if name == "a") == told
    assert answers["b", 0].said == solo(request("b", prompt_of(5, seed=1))).said


# One choice's failure is the request's


def test_an_error_in_the_prompt_ends_every_choice() -> None:
    engine, _ = engine_of()
    answers = run_choices(engine, request("a", [*prompt_of(5), POISON], n=3))
    assert [(one.finish, one.last.error, one.token_ids) for one in answers] == [
        (Finish.ERROR, "PoisonError: position 5", [])
    ] * 3


def test_bad_logits_at_the_prompts_end_end_every_choice() -> None:
    engine, _ = engine_of()
    answers = run_choices(engine, request("a", [*prompt_of(9), NAN], n=3))
    assert [one.finish for one in answers] == [Finish.ERROR] * 3
    assert engine.stats().blocks_cached == 0


@pytest.mark.parametrize("bad", [POISON, NAN])
def test_one_choices_error_ends_all_that_are_open(bad: int) -> None:
    """What choice 2 has begun with leads to a token that the model can't bear."""
    asked = request("a", prompt_of(5), n=4, sampling=SAMPLED)
    script = [[token, *ids("abcdef")] for token in range(4, VOCAB)]
    first = [answer.token_ids[0] for answer in run_choices(engine_over(Forced(64, BS, script=script)), asked)]
    assert first.count(first[2]) == 1
    script[first[2] - 4] = [first[2], *ids("a"), bad]
    engine = engine_over(Forced(64, BS, script=script))
    answers = run_choices(engine, asked)
    assert [(len(one.token_ids), one.finish) for one in answers] == [(3, Finish.ERROR)] * 4
    assert {one.last.error for one in answers} == {"PoisonError: position 7" if bad == POISON else "non-finite logits"}
    assert run(engine, request("b", prompt_of(6)))[0].finish is Finish.LENGTH
