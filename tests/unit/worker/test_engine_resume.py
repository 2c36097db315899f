"""A request that goes on elsewhere: from the tokens it has said, with the output that it would have had."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.unit.worker.engine_run import (
    Answer,
    Answers,
    engine_of,
    finish_all,
    forced,
    go_on,
    ids,
    prompt_of,
    request,
    solo_choices,
    step,
)
from tests.unit.worker.paged_model import EOS, VOCAB
from tests.unit.worker.test_engine_property import requests
from worker.params import AdmissionError, ReplayError, SamplingParams
from worker.sequence import Finish

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from worker.engine import Engine
    from worker.sequence import Request
    from worker.step import Output

PENALTIES = SamplingParams(
    temperature=1.2, top_p=0.95, seed=9, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7
)
ASKED = {
    "greedy": request("a", prompt_of(9), max_tokens=12),
    "seeded": request("a", prompt_of(9), max_tokens=12, sampling=SamplingParams(temperature=1.5, seed=4)),
    "penalties": request("a", prompt_of(7), max_tokens=14, sampling=PENALTIES, n=3, ignore_eos=False, min_tokens=5),
    "logprobs": request("a", prompt_of(8), max_tokens=9, sampling=PENALTIES, n=3, logprobs=2, prompt_logprobs=1),
    "stops": request("a", prompt_of(6), max_tokens=40, sampling=PENALTIES, n=3, stop=(" a", "e", "🙂"), min_tokens=2),
    "bias": request(
        "a",
        prompt_of(5),
        max_tokens=20,
        n=2,
        ignore_eos=False,
        include_stop=True,
        sampling=SamplingParams(temperature=1.0, seed=3, logit_bias=((EOS, 4.0), (20, 3.0))),
        stop_token_ids=(9, 10, 11),
    ),
}


def cut_after(asked: Request, steps: int) -> tuple[Answers, bool]:
    """What is told of a request until its worker dies, and whether it lives that long."""
    engine, answers = engine_of(token_budget=8)[0], Answers()
    engine.add(asked)
    for _ in range(steps):
        if not engine.has_work:
            break
        step(engine, answers)
    return answers, engine.has_work


@pytest.mark.parametrize("kind", ASKED)
def test_resumed_after_any_step_it_says_what_it_would_have_said(kind: str) -> None:
    asked, steps = ASKED[kind], 0
    expected = [answer.said for answer in solo_choices(asked)]
    while True:
        answers, lives = cut_after(asked, steps)
        if not lives:
            break
        engine, _ = engine_of()
        go_on(engine, asked, answers)
        finish_all(engine, answers)
        assert [answers["a", choice].said for choice in range(asked.n)] == expected
        steps += 1
    assert steps > 3


def test_it_may_be_cut_off_again_and_again() -> None:
    asked, answers = ASKED["penalties"], Answers()
    for _ in range(30):
        engine, _ = engine_of()
        go_on(engine, asked, answers)
        for _ in range(2):
            step(engine, answers)
        if not engine.has_work:
            break
    assert [answers["a", choice].said for choice in range(asked.n)] == [one.said for one in solo_choices(asked)]


@given(asked=requests, steps=st.integers(0, 25), num_blocks=st.integers(12, 30), budget=st.integers(1, 24))
@settings(max_examples=150)
def test_any_request_cut_anywhere_goes_on_in_any_pool(asked: Request, steps: int, num_blocks: int, budget: int) -> None:
    answers: Answers = {}
    first, _ = engine_of(num_blocks, token_budget=budget, context_length=10_000)
    first.add(asked)
    for _ in range(steps):
        if first.has_work:
            step(first, answers)
    if first.has_work:
        second, _ = engine_of(num_blocks, token_budget=25 - budget, context_length=10_000)
        go_on(second, asked, answers)
        finish_all(second, answers)
    assert [answers["solo", choice].said for choice in range(asked.n)] == [one.said for one in solo_choices(asked)]


# What was held back


def text_after(engine: Engine, asked: Request, said: Sequence[int]) -> tuple[str, Finish | None, str]:
    """What is told once the request goes on after these tokens."""
    engine.add(asked, {0: said})
    rest: list[Output] = []
    while engine.has_work:
        rest += engine.step().outputs
    assert rest[0].start == len(said)
    return "".join(output.text for output in rest), rest[-1].finish, rest[-1].stop_match


@pytest.mark.parametrize(
    ("whole", "cut", "stop", "expected"),
    [
        # "a" was told, "b" was held back as the start of a stop string, and isn't one.
        (" abx", 2, ("bc",), ("bx", Finish.LENGTH, "")),
        # The stop string is completed by the token after the cut, and cuts off what was held back.
        (" abc", 2, ("bc",), ("", Finish.STOP, "bc")),
        (" abc", 1, ("xyz",), ("bc", Finish.LENGTH, "")),
        # A character of three bytes, two of which were said.
        ("语", 2, (), ("语", Finish.LENGTH, "")),
        ("语", 1, ("语",), ("", Finish.STOP, "语")),
    ],
)
def test_text_that_was_held_back_comes_after_the_cut(
    whole: str, cut: int, stop: tuple[str, ...], expected: tuple[str, Finish, str]
) -> None:
    tokens = ids(whole)
    asked = request("a", prompt_of(5), max_tokens=len(tokens), stop=stop)
    assert text_after(forced(tokens), asked, tokens[:cut]) == expected


# Choices


def test_choices_share_the_blocks_of_their_prompt() -> None:
    engine, model = engine_of()
    asked = request("a", prompt_of(12), n=3, max_tokens=6)
    engine.add(asked, {0: [10, 11, 12], 1: [20, 21, 22], 2: [30, 31]})
    step(engine)
    step(engine)
    assert [[(row.start, len(row.token_ids)) for row in rows] for rows in model.steps] == [
        [(0, 15)],
        [(15, 1), (12, 3), (12, 2)],
    ]


@pytest.mark.parametrize("known", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_a_choice_whose_first_token_was_lost_draws_it_from_its_own_row(known: Collection[int]) -> None:
    """The first tokens of a fork went out in several commits, of which only some were taken."""
    asked = ASKED["logprobs"]
    before, _ = cut_after(asked, 1)
    expected = solo_choices(asked)
    answers = {key: answer for key, answer in before.items() if key[1] in known}
    assert len(answers) == len(known)
    engine, _ = engine_of(token_budget=5)
    go_on(engine, asked, answers)
    finish_all(engine, answers)
    assert [answers["a", choice].said for choice in range(asked.n)] == [answer.said for answer in expected]


def test_choices_that_have_ended_stay_ended() -> None:
    asked = request("a", prompt_of(5), n=3, max_tokens=4, ignore_eos=False)
    engine = forced(ids(" a b c d"))
    engine.add(asked, {1: ids(" a b")}, {0, 2})
    answers = finish_all(engine, {("a", 1): Answer(ids(" a b"), " a b")})
    assert {choice: answer.text for (_, choice), answer in answers.items()} == {1: " a b c d"}


def test_a_failure_ends_the_choices_that_are_open() -> None:
    engine = forced([*ids(" a"), 2, 9])
    engine.add(request("a", prompt_of(5), n=3, max_tokens=4), {1: ids(" a"), 2: ids(" a")}, {0})
    outputs = [output for _ in range(3) for output in engine.step().outputs if output.finish]
    assert [(output.choice, output.finish, output.start) for output in outputs] == [
        (1, Finish.ERROR, 2),
        (2, Finish.ERROR, 1),  # it waited a step for the first one's prompt
    ]
    assert not engine.has_work


def test_what_it_finds_in_the_cache_is_not_counted_again() -> None:
    engine, _ = engine_of()
    asked = request("a", prompt_of(12), n=2, max_tokens=6)
    engine.add(asked)
    step(engine)
    before = engine.stats()
    assert engine.abort("a")
    engine.add(asked, {0: [10], 1: [11]})
    outputs = step(engine).outputs
    after = engine.stats()
    assert (after.prefix_queried, after.prefix_hit) == (before.prefix_queried, before.prefix_hit) == (12, 0)
    assert [output.cached_tokens for output in outputs] == [0, 0]


# What nothing can follow on

SAID: dict[str, tuple[Request, Mapping[int, Sequence[int]], Collection[int], str]] = {
    "an end token": (
        request("a", prompt_of(5), ignore_eos=False),
        {0: [9, EOS]},
        (),
        "choice 0 can't go on after its 2 tokens: they hold its end",
    ),
    "a stop token": (
        request("a", prompt_of(5), n=2, stop_token_ids=(30,)),
        {0: [9], 1: [30, 9]},
        (),
        "choice 1 can't go on after its 2 tokens: they hold its end",
    ),
    "a stop string": (
        request("a", prompt_of(5), stop=("bc",)),
        {0: ids(" abcd")},
        (),
        "choice 0 can't go on after its 4 tokens: they hold its end",
    ),
    "all its tokens": (
        request("a", prompt_of(5), max_tokens=2),
        {0: [9, 9]},
        (),
        "choice 0 can't go on after its 2 tokens: there is no room for more",
    ),
    "a full context": (
        request("a", prompt_of(195), max_tokens=99),
        {0: [9] * 5},
        (),
        "choice 0 can't go on after its 5 tokens: there is no room for more",
    ),
    "a token that there is not": (
        request("a", prompt_of(5), n=2),
        {0: [9], 1: [VOCAB]},
        (),
        f"the output of choice 1 has token id {VOCAB}; ids are below {VOCAB}",
    ),
    "every end": (
        request("a", prompt_of(5), n=2),
        {0: [9]},
        (0, 1),
        "of 2 choices, [0] have said something, [0, 1] ended",
    ),
    "a choice that there is not": (
        request("a", prompt_of(5)),
        {0: [9], 1: [9]},
        (),
        "of 1 choices, [0, 1] have said something, [] ended",
    ),
}


@pytest.mark.parametrize("what", SAID)
def test_what_holds_an_end_is_no_beginning(what: str) -> None:
    asked, said, ended, error = SAID[what]
    engine, _ = engine_of()
    with pytest.raises(ReplayError) as refused:
        engine.add(asked, said, ended)
    assert str(refused.value) == error
    assert not engine.has_work
    engine.check_integrity()


def test_a_prompt_that_is_too_long_is_refused_as_ever() -> None:
    engine, _ = engine_of()
    with pytest.raises(AdmissionError) as refused:
        engine.add(request("a", prompt_of(200), n=2), {1: []}, {0})
    assert not isinstance(refused.value, ReplayError)
    assert not engine.has_work
    engine.check_integrity()


def test_nothing_said_is_a_request_that_begins() -> None:
    asked = request("a", prompt_of(9), n=3)
    engine, model = engine_of()
    engine.add(asked, {0: [], 1: []}, ())
    answers = finish_all(engine)
    assert [len(rows) for rows in model.steps][:2] == [1, 3]
    assert [answers["a", choice].said for choice in range(3)] == [answer.said for answer in solo_choices(asked)]
