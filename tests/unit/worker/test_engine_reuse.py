"""What sequences leave behind for others, and what must be theirs alone: pages, hashes, seeds.

Comments such as F05 name the public fault reports of other servers that a test guards against.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest

from kvstore.block_hash import chain, root
from tests.unit.worker.engine_run import (
    BS,
    Answers,
    engine_of,
    finish_all,
    prompt_of,
    request,
    run,
    run_choices,
    solo,
    solo_choices,
    step,
)
from tests.unit.worker.paged_model import NAN
from worker.params import SamplingParams
from worker.scheduling.block import EventKind
from worker.sequence import Finish


def test_pages_that_are_evicted_while_a_request_waits_for_them_are_computed_again() -> None:  # F05
    engine, model = engine_of(num_blocks=6, max_running=1)
    warm = request("warm", prompt_of(17), max_tokens=1)
    late = request("late", warm.prompt, max_tokens=5, logprobs=1)
    run(engine, warm)
    assert engine.stats().blocks_cached == 4
    # It comes while all of its prompt is cached; what runs before it takes every block.
    big = request("big", prompt_of(20, seed=1), max_tokens=4)
    answers: Answers = {}
    engine.add(big)
    engine.add(late)
    finish_all(engine, answers)
    assert engine.stats().evictions >= 4
    assert answers["late", 0].said == solo(late).said
    assert answers["big", 0].said == solo(big).said
    assert answers["late", 0].last.cached_tokens == 0
    assert sum(len(row.token_ids) for rows in model.steps for row in rows) == 17 + 20 + 3 + 17 + 4


@pytest.mark.parametrize("salt", ["", "tenant"])
def test_pages_are_stored_under_the_hashes_that_any_process_would_compute(salt: str) -> None:  # F08, F11
    engine, _ = engine_of()
    asked = request("a", prompt_of(10), max_tokens=9, salt=salt)
    engine.add(asked)
    answers: Answers = {}
    stored = []
    while engine.has_work:
        stored += [event.hash for event in step(engine, answers).events if event.kind is EventKind.STORED]
    written = [*asked.prompt, *answers["a", 0].token_ids[:-1]]  # the last one was drawn, and never computed
    assert stored == chain(root("paged model", BS, salt), written, BS)
    assert len(stored) == 4


def test_a_conversation_is_found_up_to_what_the_client_leaves_out() -> None:  # F09
    """The first answer begins with tokens that the client does not send again, as reasoning is treated."""
    engine, _ = engine_of(max_running=1, cache_blocks=16)
    history = prompt_of(14)
    found = []
    for turn in range(6):
        asked = request(f"t{turn}", history, max_tokens=14)
        answer = run(engine, asked)[0]
        assert answer.said == solo(asked).said
        found.append(answer.last.cached_tokens)
        useful = len(history)
        history = [*history, *answer.token_ids[8:], *prompt_of(6, seed=turn + 1)]
        # However many turns there are, what is kept does not grow beyond its bound.
        assert engine.stats().blocks_cached <= 16
        assert useful - useful % BS + 12 == len(history) - useful % BS
    assert found == [0, 12, 24, 36, 48, 60]


@pytest.mark.parametrize("n", [1, 3])
def test_a_seeded_answer_survives_its_preemption(n: int) -> None:  # C14
    """A third of the blocks that all of them want: each answer is that of an undisturbed run, and the same again."""
    asked = [
        request(f"r{seed}", prompt_of(6, seed=seed), max_tokens=20, sampling=SamplingParams(seed=seed), n=n)
        for seed in range(6)
    ]
    for _ in range(2):
        engine, _ = engine_of(num_blocks=14)
        for one in asked:
            engine.add(one)
        answers = finish_all(engine)
        assert engine.stats().preemptions >= 4
        for one in asked:
            expected = solo_choices(one)
            assert [answers[one.request_id, choice].said for choice in range(n)] == [each.said for each in expected]


def test_answers_of_many_seeds_are_equal_as_often_as_chance_will_have_it() -> None:  # K06
    """Equal answers at temperature 1 are what broken logits look like. Two answers are the same with the probability
    that the model gives to the one of them; of 400 seeds many pairs are."""
    seeds = range(400)
    asked = [
        request(f"r{seed}", prompt_of(7), max_tokens=4, sampling=SamplingParams(seed=seed), logprobs=0)
        for seed in seeds
    ]
    answers = run(engine_of(1000, max_running=100, token_budget=800)[0], *asked)
    pairs = len(seeds) * (len(seeds) - 1) / 2
    for length in (1, 2, 4):
        said = Counter(tuple(answer.token_ids[:length]) for answer in answers)
        equal = sum(count * (count - 1) // 2 for count in said.values())
        chances = [math.exp(sum(one.logprob for one in answer.logprobs[:length])) for answer in answers]
        assert equal == pytest.approx(pairs * sum(chances) / len(chances), rel=0.15)
    choices = run_choices(engine_of()[0], request("n", prompt_of(7), n=8, sampling=SamplingParams(seed=9)))
    assert len({tuple(choice.token_ids) for choice in choices}) == 8


def test_broken_logits_give_no_answer_whatever_the_seed() -> None:  # K05, K06
    bad = [request(f"b{seed}", [5, NAN], sampling=SamplingParams(temperature=1.0, seed=seed)) for seed in range(20)]
    answers = run(engine_of()[0], *bad)
    assert {(answer.finish, answer.last.error, len(answer.token_ids)) for answer in answers} == {
        (Finish.ERROR, "non-finite logits", 0)
    }
