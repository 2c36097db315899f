"""Answers with a form: no token out of it, the right end, and the same tokens whatever happens around them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.unit.worker.engine_run import (
    GREEDY,
    Answers,
    engine_of,
    finish_all,
    forced,
    go_on,
    prompt_of,
    request,
    run,
    run_choices,
    solo,
    solo_choices,
    step,
)
from tests.unit.worker.forms import Thirds, formed
from tests.unit.worker.paged_model import EOS, TABLE
from worker.params import AdmissionError, ReplayError, SamplingParams
from worker.sequence import Finish

if TYPE_CHECKING:
    from worker.sequence import Request

SEEDED = SamplingParams(temperature=1.3, top_p=0.95, seed=5)
PENALTIES = SamplingParams(temperature=1.0, seed=2, frequency_penalty=1.5, logit_bias=((20, 90.0), (EOS, -90.0)))
ASKED = {
    "greedy": formed("a", prompt_of(9)),
    "seeded": formed("a", prompt_of(9), sampling=SEEDED, n=3),
    "penalties": formed("a", prompt_of(7), sampling=PENALTIES, n=2, logprobs=2, prompt_logprobs=1),
    "late ends": formed("a", prompt_of(8), sampling=SEEDED, min_tokens=9, n=2),
    "stops": formed(
        "a", prompt_of(6), Thirds(30), sampling=SEEDED, n=3, stop=(" a", "e", "🙂"), stop_token_ids=(9, 40)
    ),
}


@pytest.mark.parametrize("kind", ASKED)
def test_nothing_comes_that_is_out_of_form(kind: str) -> None:
    asked, ends = ASKED[kind], {EOS, *ASKED[kind].stopping.stop_token_ids}
    form = asked.grammar
    assert isinstance(form, Thirds)
    for seed in range(20):
        mine = replace(asked, sampling=replace(asked.sampling, seed=seed))
        for answer in solo_choices(mine):
            assert form.has(answer.token_ids)
            assert not ends & {*answer.token_ids[:-1]}
            assert answer.finish in (Finish.STOP, Finish.LENGTH)
            assert (answer.finish is Finish.LENGTH) == (len(answer.token_ids) == 40)
            stopped_by_token = answer.token_ids[-1] in ends
            assert answer.last.stop_token == (answer.token_ids[-1] if stopped_by_token else None)
            if not stopped_by_token and not answer.last.stop_match:
                assert len(answer.token_ids) == form.length


@pytest.mark.parametrize("kind", ASKED)
def test_neighbours_chunks_and_small_pools_change_nothing(kind: str) -> None:
    asked = ASKED[kind]
    others = [
        formed(f"o{index}", prompt_of(4 + index, seed=index), Thirds(8 + index), sampling=replace(SEEDED, seed=index))
        for index in range(3)
    ]
    plain = [request(f"p{index}", prompt_of(5, seed=index), max_tokens=20) for index in range(3)]
    expected = {
        (one.request_id, c): whole.said for one in (asked, *others) for c, whole in enumerate(solo_choices(one))
    }
    preemptions = 0
    for num_blocks, token_budget, max_running in ((200, 999, 10), (16, 5, 10), (14, 64, 9), (99, 3, 2)):
        engine, _ = engine_of(num_blocks, token_budget=token_budget, max_running=max_running)
        for one in (*others, *plain, asked):
            engine.add(one)
        answers = finish_all(engine)
        assert {key: answers[key].said for key in expected} == expected
        preemptions += engine.stats().preemptions
    assert preemptions


@pytest.mark.parametrize("kind", ASKED)
def test_resumed_after_any_step_it_says_what_it_would_have_said(kind: str) -> None:
    asked, steps = ASKED[kind], 0
    expected = [answer.said for answer in solo_choices(asked)]
    while True:
        first, answers = engine_of(token_budget=8)[0], Answers()
        first.add(asked)
        for _ in range(steps):
            if first.has_work:
                step(first, answers)
        if not first.has_work:
            break
        engine, _ = engine_of()
        go_on(engine, asked, answers)
        finish_all(engine, answers)
        assert [answers["a", choice].said for choice in range(asked.n)] == expected
        steps += 1
    assert steps > 3


def test_where_nothing_can_follow_the_answer_ends_with_all_of_its_text() -> None:
    """Without a step for the end token."""
    answer = solo(formed("a", prompt_of(9), Thirds(6), sampling=PENALTIES, stop=("never",)))
    assert (answer.finish, answer.last.stop_token, len(answer.token_ids)) == (Finish.STOP, None, 6)
    assert answer.text == b"".join(TABLE[token] for token in answer.token_ids).decode(errors="replace")


def test_the_end_can_be_chosen_only_where_the_form_has_one() -> None:
    wants_to_end = SamplingParams(temperature=0.0, logit_bias=((EOS, 1000.0),))
    answer = solo(formed("a", prompt_of(9), sampling=wants_to_end))
    assert (answer.token_ids[-1], len(answer.token_ids), answer.finish) == (EOS, 5, Finish.STOP)
    later = solo(formed("a", prompt_of(9), sampling=wants_to_end, min_tokens=6))
    assert (later.token_ids[-1], len(later.token_ids)) == (EOS, 9)


def test_the_form_ends_an_answer_before_min_tokens() -> None:
    """By itself, or because nothing but a token that is banned until then can come."""
    whole = solo(formed("a", prompt_of(9), Thirds(6), min_tokens=30))
    assert (whole.finish, len(whole.token_ids)) == (Finish.STOP, 6)

    class OnlyEnd(Thirds):
        def follows(self, said: list[int]) -> set[int]:  # type: ignore[override]
            return {EOS} if len(said) == 3 else super().follows(said) - {EOS}

    ended = solo(formed("a", prompt_of(9), OnlyEnd(), min_tokens=30))
    assert (ended.finish, ended.token_ids[3:], ended.last.stop_token) == (Finish.STOP, [EOS], EOS)


def test_a_form_that_breaks_fails_its_own_request_alone() -> None:
    healthy = [formed("b", prompt_of(6), sampling=SEEDED), request("c", prompt_of(7))]
    expected = [solo(one).said for one in healthy]
    engine, _ = engine_of()
    for one in (formed("a", prompt_of(5), Thirds(breaks_at=3), n=2, sampling=SEEDED), *healthy):
        engine.add(one)
    answers = finish_all(engine)
    assert [answers[one.request_id, 0].said for one in healthy] == expected
    for choice in range(2):
        assert (answers["a", choice].finish, answers["a", choice].last.error) == (Finish.ERROR, "out of form")
        assert answers["a", choice].last.refused
        assert len(answers["a", choice].token_ids) == 3


def test_what_is_told_of_tokens_is_of_the_models_own_distribution() -> None:
    asked = formed("a", prompt_of(5), Thirds(3), logprobs=3)
    (answer,) = run(forced([31]), asked)
    first = answer.logprobs[0]
    assert first.token_id == answer.token_ids[0] != 31
    assert first.top[0] == (31, pytest.approx(0.0, abs=1e-6))
    assert first.logprob == pytest.approx(-100.0, abs=0.1)


def test_one_mask_is_made_for_each_token_and_one_for_all_first_ones() -> None:
    form = Thirds(10)
    answers = run_choices(engine_of()[0], formed("a", prompt_of(5), form, n=3))
    assert form.masks == 1 + sum(len(answer.token_ids) - 1 for answer in answers)


# What is refused


def test_a_form_and_a_model_whose_end_is_ignored_do_not_go_together() -> None:
    engine, _ = engine_of()
    with pytest.raises(AdmissionError, match="ignore_eos is true; it must be false where the text has a form"):
        engine.add(formed("a", prompt_of(5), ignore_eos=True))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ([4, 4], "choice 0 can't have said its 2 tokens: out of form"),
        ("whole", "choice 0 can't go on after its 14 tokens: they hold its end"),
    ],
)
def test_nothing_goes_on_after_what_the_form_does_not_have(said: list[int] | str, reason: str) -> None:
    asked: Request = formed("a", prompt_of(5), sampling=replace(GREEDY, logit_bias=((EOS, -1000.0),)))
    past = solo(asked).token_ids if isinstance(said, str) else said
    with pytest.raises(ReplayError, match=reason):
        engine_of()[0].add(asked, {0: past})
