"""The engine over a model that sees nothing but its pages: single requests, and many at once.

Comments such as G01 name the public fault reports of other servers that a test guards against.
"""

from __future__ import annotations

import pytest

from tests.unit.worker.engine_run import (
    GREEDY,
    Answers,
    engine_of,
    finish_all,
    prompt_of,
    request,
    run,
    solo,
    step,
)
from worker.params import AdmissionError, SamplingParams
from worker.scheduling.block import EventKind
from worker.sequence import Finish

# One request


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 10])
def test_exactly_max_tokens_come_out(max_tokens: int) -> None:  # B04
    engine, _ = engine_of()
    (answer,) = run(engine, request("a", prompt_of(5), max_tokens=max_tokens))
    assert len(answer.token_ids) == max_tokens
    assert answer.finish is Finish.LENGTH  # A19
    assert (answer.last.prompt_tokens, answer.last.completion_tokens) == (5, max_tokens)


def test_every_step_gives_one_token_with_its_text_and_place() -> None:
    engine, _ = engine_of()
    engine.add(request("a", prompt_of(6), max_tokens=3))
    outputs = [engine.step().outputs for _ in range(3)]
    assert [len(output) for output in outputs] == [1, 1, 1]
    assert [output[0].start for output in outputs] == [0, 1, 2]
    assert [output[0].finish for output in outputs] == [None, None, Finish.LENGTH]
    assert not engine.has_work


def test_a_chunked_prompt_says_nothing_until_it_is_done() -> None:
    engine, model = engine_of(token_budget=4)
    engine.add(request("a", prompt_of(10), max_tokens=1))
    assert [len(engine.step().outputs) for _ in range(3)] == [0, 0, 1]
    assert [[(row.start, len(row.token_ids), row.logits) for row in rows] for rows in model.steps] == [
        [(0, 4, 0)],
        [(4, 4, 0)],
        [(8, 2, 1)],
    ]


def test_the_context_ends_a_sequence() -> None:
    engine, _ = engine_of(context_length=20)
    answers = run(engine, request("a", prompt_of(5), max_tokens=100), request("b", prompt_of(19), max_tokens=100))
    assert [len(answer.token_ids) for answer in answers] == [15, 1]
    assert [answer.finish for answer in answers] == [Finish.LENGTH] * 2


def test_the_pool_bounds_the_context() -> None:
    engine, _ = engine_of(num_blocks=4, context_length=200)
    assert engine.context_length == 16
    (answer,) = run(engine, request("a", prompt_of(15)))
    assert len(answer.token_ids) == 1
    with pytest.raises(AdmissionError, match="has 16 tokens; at most 15 fit"):
        engine.add(request("b", prompt_of(16)))
    assert not engine.has_work


# Many requests


def test_neighbours_chunks_hits_and_small_pools_change_nothing() -> None:
    shared = prompt_of(17, seed=1)
    asked = [
        request(
            f"r{index}",
            [*shared[: 4 * (index % 5)], *prompt_of(3 + 2 * index, seed=index)],
            max_tokens=5 + index,
            sampling=SamplingParams(temperature=1.0, top_p=0.9, seed=index) if index % 2 else GREEDY,
            logprobs=index % 3,
            prompt_logprobs=2 if index == 6 else None,
        )
        for index in range(10)
    ]
    expected = [solo(one).said for one in asked]
    for num_blocks, token_budget, max_running, chunk_tokens in (
        (200, 999, 10, None),
        (200, 7, 10, 3),
        (16, 5, 10, None),
        (13, 64, 3, 8),
        (99, 3, 2, None),
    ):
        engine, _ = engine_of(num_blocks, token_budget=token_budget, max_running=max_running, chunk_tokens=chunk_tokens)
        assert [one.said for one in run(engine, *asked)] == expected


def test_requests_join_and_leave_at_every_step() -> None:
    engine, _ = engine_of(max_running=3)
    answers: Answers = {}
    asked = [request(f"r{index}", prompt_of(3 + index, seed=index), max_tokens=1 + index % 4) for index in range(12)]
    for one in asked:
        engine.add(one)
        step(engine, answers)
    finish_all(engine, answers)
    assert {key: answer.token_ids for key, answer in answers.items()} == {
        (one.request_id, 0): solo(one).token_ids for one in asked
    }


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,  # G01
        SamplingParams(temperature=0.0, frequency_penalty=1.0),  # G02
        SamplingParams(temperature=1.0, repetition_penalty=1.3, presence_penalty=0.5, seed=3),
    ],
    ids=["greedy", "frequency penalty", "other penalties"],
)
def test_preemption_changes_no_output(sampling: SamplingParams) -> None:
    asked = [request(f"r{index}", prompt_of(6, seed=index), max_tokens=30, sampling=sampling) for index in range(8)]
    engine, _ = engine_of(num_blocks=18)
    answers = run(engine, *asked)
    assert engine.stats().preemptions >= 4
    assert [answer.said for answer in answers] == [solo(one).said for one in asked]
    # What a recompute finds in the cache is the sequence's own work.
    assert [answer.last.cached_tokens for answer in answers] == [0] * 8
    assert (engine.stats().prefix_queried, engine.stats().prefix_hit) == (48, 0)


@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_whoever_is_preempted_at_whatever_step_goes_on_where_it_was(every: int) -> None:  # G03
    """A pool for two of four: at every few steps a newcomer takes a block that somebody else has to give."""
    asked = [request(f"r{index}", prompt_of(4 + index, seed=index), max_tokens=12, logprobs=0) for index in range(9)]
    engine, _ = engine_of(num_blocks=9, max_running=4)
    answers: Answers = {}
    for one in asked:
        engine.add(one)
        for _ in range(every):
            step(engine, answers)
    finish_all(engine, answers)
    assert engine.stats().preemptions > 0
    assert [answers[one.request_id, 0].said for one in asked] == [solo(one).said for one in asked]


def test_cached_tokens_are_the_hit_at_the_first_admission() -> None:
    engine, _ = engine_of()
    prompt = prompt_of(16)
    first = run(engine, request("a", prompt))[0]
    again = run(engine, request("b", prompt))[0]
    longer = run(engine, request("c", [*prompt, 5, 6, 7, 8]))[0]
    salted = run(engine, request("d", prompt, salt="secret"))[0]
    assert [one.last.cached_tokens for one in (first, again, longer, salted)] == [0, 15, 16, 0]
    assert first.token_ids == again.token_ids == salted.token_ids
    assert (engine.stats().prefix_queried, engine.stats().prefix_hit) == (68, 31)


def test_a_prompt_that_is_cached_whole_computes_one_token_on_a_copy() -> None:
    engine, model = engine_of()
    asked = request("a", prompt_of(12), max_tokens=6)
    first = run(engine, asked)[0]
    model.steps.clear()
    again = run(engine, asked)[0]
    assert [(row.start, len(row.token_ids)) for row in model.steps[0]] == [(11, 1)]
    assert again.said == first.said == solo(asked).said
    assert again.last.cached_tokens == 11


def test_the_same_prompt_twice_at_once_is_computed_once() -> None:
    engine, model = engine_of()
    prompt = prompt_of(13)
    one, two = run(engine, request("a", prompt), request("b", prompt))
    assert one.token_ids == two.token_ids
    assert [answer.last.cached_tokens for answer in (one, two)] == [0, 12]
    assert sum(len(row.token_ids) for rows in model.steps for row in rows) == 13 + 1 + 2 * 7


def test_a_cleared_cache_is_found_by_nobody() -> None:
    engine, _ = engine_of()
    asked = request("a", prompt_of(16))
    first = run(engine, asked)[0]
    assert engine.stats().blocks_cached == 5
    engine._scheduler.pool.clear()
    assert (engine.stats().blocks_cached, engine.stats().blocks_free) == (0, 64)
    answers: Answers = {}
    engine.add(asked)
    assert [event.kind for event in step(engine, answers).events][:1] == [EventKind.CLEARED]
    again = finish_all(engine, answers)["a", 0]
    assert again.said == first.said
    assert again.last.cached_tokens == 0


def test_aborting_at_every_moment_frees_everything() -> None:  # G09
    """Waiting, half-way through the prompt, about to be forked, decoding, preempted, finished."""
    for moment in range(25):
        engine, _ = engine_of(num_blocks=10, token_budget=6)
        for index in range(4):
            prompt = [*prompt_of(5), *prompt_of(6, seed=index)]
            engine.add(request(f"r{index}", prompt, max_tokens=9, n=1 + index % 2, prompt_logprobs=index % 2 or None))
        answers: Answers = {}
        for _ in range(moment):
            if engine.has_work:
                step(engine, answers)
        for index in (2, 0, 3, 1):
            own = [answer for (name, _), answer in answers.items() if name == f"r{index}"]
            ended = len(own) == 1 + index % 2 and all(answer.finish is not None for answer in own)
            assert engine.abort(f"r{index}") is not ended
            engine.check_integrity()
            assert not engine.abort(f"r{index}")
        assert not engine.has_work
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
        assert stats.blocks_free + stats.blocks_cached == 10


def test_an_abort_behind_the_last_token_finds_nothing() -> None:  # G12
    engine, _ = engine_of()
    for turn in range(50):
        engine.add(request(f"r{turn}", prompt_of(5), max_tokens=2))
        outputs = [output for _ in range(2) for output in engine.step().outputs]
        assert [output.finish for output in outputs] == [None, Finish.LENGTH]
        assert not engine.abort(f"r{turn}")
        engine.check_integrity()


def test_an_unknown_request_can_be_aborted() -> None:
    engine, _ = engine_of()
    assert not engine.abort("nobody")


def test_an_id_can_be_used_again_after_its_end() -> None:
    engine, _ = engine_of()
    asked = request("a", prompt_of(9))
    assert run(engine, asked)[0].token_ids == run(engine, asked)[0].token_ids
