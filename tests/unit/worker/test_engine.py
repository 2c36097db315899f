"""The engine over a model that sees nothing but its pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
import torch

from tests.unit.worker.paged_model import EOS, NAN, POISON, TABLE, VOCAB, PagedModel
from worker.block_pool import BlockPool
from worker.engine import AdmissionError, Engine, Output, StepOutput
from worker.params import SamplingParams, StopParams
from worker.sampler import sample
from worker.scheduler import Scheduler
from worker.sequence import Finish, Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker.engine import Sampler
    from worker.step import StepRow

BS = 4
GREEDY = SamplingParams(temperature=0.0)


def engine_of(
    num_blocks: int = 64,
    *,
    max_running: int = 8,
    token_budget: int = 64,
    context_length: int = 200,
    most_rows: int = 99,
) -> tuple[Engine, PagedModel]:
    model = PagedModel(num_blocks, BS, most_rows=most_rows)
    return engine_over(model, max_running=max_running, token_budget=token_budget, context_length=context_length), model


def engine_over(
    model: PagedModel,
    *,
    max_running: int = 8,
    token_budget: int = 64,
    context_length: int = 200,
    sampler: Sampler = sample,
) -> Engine:
    scheduler = Scheduler(
        BlockPool(model.num_blocks, model.block_size),
        max_running=max_running,
        token_budget=token_budget,
        context_length=context_length,
    )
    return Engine(
        model, scheduler, sampler=sampler, text_stream=TABLE.stream, eos_token_ids=[EOS], fingerprint="paged model"
    )


def request(
    name: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 8,
    sampling: SamplingParams = GREEDY,
    stop: tuple[str, ...] = (),
    ignore_eos: bool = True,
    include_stop: bool = False,
    salt: str = "",
) -> Request:
    stopping = StopParams(max_tokens, stop=stop, ignore_eos=ignore_eos, include_stop=include_stop)
    return Request(name, tuple(prompt), sampling, stopping, salt)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Harmless tokens."""
    return torch.randint(4, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass
class Answer:
    """All outputs of one choice, put together and checked for gaps."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    last: Output | None = None

    def take(self, output: Output) -> None:
        assert self.last is None or self.last.finish is None, "an output after the last"
        assert output.start == len(self.token_ids), "a gap or a repeat"
        assert output.first == (self.last is None)
        self.token_ids += output.token_ids
        self.text += output.text
        self.last = output
        assert output.completion_tokens == len(self.token_ids)

    @property
    def finish(self) -> Finish | None:
        return self.last.finish if self.last else None


def step(engine: Engine, answers: dict[tuple[str, int], Answer] | None = None) -> StepOutput:
    result = engine.step()
    engine.check_integrity()
    for output in result.outputs if answers is not None else ():
        assert answers is not None
        answers.setdefault((output.request_id, output.choice), Answer()).take(output)
    return result


def finish_all(engine: Engine, answers: dict[tuple[str, int], Answer] | None = None) -> dict[tuple[str, int], Answer]:
    answers = {} if answers is None else answers
    for _ in range(5000):
        if not engine.has_work:
            assert engine.stats().blocks_used == 0
            return answers
        step(engine, answers)
    raise AssertionError("no end")


def solo(asked: Request) -> Answer:
    """The request alone, on an empty pool with room for everything, in as few steps as possible."""
    engine, _ = engine_of(256, token_budget=1000, context_length=1000)
    engine.add(asked)
    return finish_all(engine)[asked.request_id, 0]


def run(engine: Engine, *asked: Request) -> list[Answer]:
    for one in asked:
        engine.add(one)
    answers = finish_all(engine)
    return [answers[one.request_id, 0] for one in asked]


# One request


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 10])
def test_exactly_max_tokens_come_out(max_tokens: int) -> None:
    engine, _ = engine_of()
    (answer,) = run(engine, request("a", prompt_of(5), max_tokens=max_tokens))
    assert len(answer.token_ids) == max_tokens
    assert answer.finish is Finish.LENGTH
    assert answer.last is not None
    assert (answer.last.prompt_tokens, answer.last.completion_tokens) == (5, max_tokens)


def test_every_step_gives_one_token_with_its_text_and_place() -> None:
    engine, _ = engine_of()
    engine.add(request("a", prompt_of(6), max_tokens=3))
    outputs = [engine.step().outputs for _ in range(3)]
    assert [len(output) for output in outputs] == [1, 1, 1]
    assert [output[0].start for output in outputs] == [0, 1, 2]
    assert [output[0].first for output in outputs] == [True, False, False]
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


def forced(tokens: Sequence[int]) -> Engine:
    """An engine whose model says just these tokens."""
    model = Forced(64, BS)
    model.tokens = list(tokens)
    return engine_over(model)


class Forced(PagedModel):
    tokens: list[int]

    def forward(self, rows: Sequence[StepRow]) -> torch.Tensor:
        logits = super().forward(rows)
        for index, row in enumerate([row for row in rows if row.logits]):
            logits[index] = 0
            logits[index, self.tokens[row.start + len(row.token_ids) - 5]] = 1
        return logits


def ids(text: str) -> list[int]:
    """Tokens of a text, the longest first."""
    data, found = text.encode(), []
    while data:
        token = max((t for t in range(VOCAB) if TABLE[t] and data.startswith(TABLE[t])), key=lambda t: len(TABLE[t]))
        found.append(token)
        data = data[len(TABLE[token]) :]
    return found


def test_eos_ends_a_sequence_and_counts_but_has_no_text() -> None:
    engine = forced([*ids(" a b"), EOS, *ids(" c")])
    (answer,) = run(engine, request("a", prompt_of(5), ignore_eos=False))
    assert (answer.text, answer.finish, answer.token_ids[-1]) == (" a b", Finish.STOP, EOS)
    assert len(answer.token_ids) == 3


def test_eos_can_be_ignored() -> None:
    engine = forced([*ids(" a"), EOS, *ids(" c")])
    (answer,) = run(engine, request("a", prompt_of(5), max_tokens=3))
    assert (answer.text, answer.finish, answer.token_ids[1]) == (" a c", Finish.LENGTH, EOS)


def test_eos_as_the_last_token_allowed_is_a_stop() -> None:
    engine = forced([*ids(" a"), EOS])
    (answer,) = run(engine, request("a", prompt_of(5), max_tokens=2, ignore_eos=False))
    assert answer.finish is Finish.STOP


@pytest.mark.parametrize(("include", "text"), [(False, " a b"), (True, " a bcd")])
def test_a_stop_string_ends_text_before_it_and_reports_all_tokens(include: bool, text: str) -> None:
    tokens = ids(" a bcdef")
    engine = forced(tokens)
    (answer,) = run(engine, request("a", prompt_of(5), stop=("cd", "zz"), include_stop=include))
    assert (answer.text, answer.finish) == (text, Finish.STOP)
    assert answer.token_ids == tokens[:4]
    assert answer.last is not None
    assert answer.last.stop_match == "cd"


def test_a_stop_with_the_last_token_allowed_is_a_stop() -> None:
    engine = forced(ids(" a b"))
    (answer,) = run(engine, request("a", prompt_of(5), max_tokens=2, stop=("b",)))
    assert (answer.text, answer.finish) == (" a ", Finish.STOP)


def test_held_back_text_comes_with_the_end() -> None:
    engine = forced(ids(" a bc"))
    engine.add(request("a", prompt_of(5), max_tokens=3, stop=("bcd",)))
    outputs = [engine.step().outputs[0] for _ in range(3)]
    assert [output.text for output in outputs] == [" a", " ", "bc"]
    assert outputs[-1].finish is Finish.LENGTH


def test_a_stop_string_in_the_very_last_character_is_a_stop() -> None:
    engine = forced([7, 8])
    (answer,) = run(engine, request("a", prompt_of(5), max_tokens=2, stop=("\ufffd",)))
    assert (answer.text, answer.finish) == ("", Finish.STOP)


def test_an_unfinished_character_comes_with_the_end() -> None:
    engine = forced([7, 8])
    (answer,) = run(engine, request("a", prompt_of(5), max_tokens=2))
    assert answer.text == "\ufffd"


# Many requests


def test_neighbours_chunks_hits_and_small_pools_change_nothing() -> None:
    shared = prompt_of(17, seed=1)
    asked = [
        request(
            f"r{index}",
            [*shared[: 4 * (index % 5)], *prompt_of(3 + 2 * index, seed=index)],
            max_tokens=5 + index,
            sampling=SamplingParams(temperature=1.0, top_p=0.9, seed=index) if index % 2 else GREEDY,
        )
        for index in range(10)
    ]
    expected = [solo(one) for one in asked]
    for num_blocks, token_budget, max_running in ((200, 999, 10), (200, 7, 10), (16, 5, 10), (13, 64, 3), (99, 3, 2)):
        engine, _ = engine_of(num_blocks, token_budget=token_budget, max_running=max_running, most_rows=10)
        answers = run(engine, *asked)
        assert [(one.token_ids, one.text) for one in answers] == [(one.token_ids, one.text) for one in expected]


def test_requests_join_and_leave_at_every_step() -> None:
    engine, _ = engine_of(max_running=3)
    answers: dict[tuple[str, int], Answer] = {}
    asked = [request(f"r{index}", prompt_of(3 + index, seed=index), max_tokens=1 + index % 4) for index in range(12)]
    for one in asked:
        engine.add(one)
        step(engine, answers)
    finish_all(engine, answers)
    assert {key: answer.token_ids for key, answer in answers.items()} == {
        (one.request_id, 0): solo(one).token_ids for one in asked
    }


def test_preemption_changes_no_output() -> None:
    asked = [request(f"r{index}", prompt_of(6, seed=index), max_tokens=30) for index in range(8)]
    engine, _ = engine_of(num_blocks=18)
    answers = run(engine, *asked)
    assert engine.stats().preemptions >= 4
    assert [answer.token_ids for answer in answers] == [solo(one).token_ids for one in asked]
    # What a recompute finds in the cache is the sequence's own work.
    assert [answer.last.cached_tokens for answer in answers if answer.last] == [0] * 8
    assert (engine.stats().prefix_queried, engine.stats().prefix_hit) == (48, 0)


def test_cached_tokens_are_the_hit_at_the_first_admission() -> None:
    engine, _ = engine_of()
    prompt = prompt_of(16)
    first = run(engine, request("a", prompt))[0]
    again = run(engine, request("b", prompt))[0]
    longer = run(engine, request("c", [*prompt, 5, 6, 7, 8]))[0]
    salted = run(engine, request("d", prompt, salt="secret"))[0]
    assert [one.last.cached_tokens for one in (first, again, longer, salted) if one.last] == [0, 12, 16, 0]
    assert first.token_ids == again.token_ids == salted.token_ids
    assert (engine.stats().prefix_queried, engine.stats().prefix_hit) == (68, 28)


def test_the_same_prompt_twice_in_one_step() -> None:
    engine, _ = engine_of()
    prompt = prompt_of(13)
    one, two = run(engine, request("a", prompt), request("b", prompt))
    assert one.token_ids == two.token_ids
    assert [answer.last.cached_tokens for answer in (one, two) if answer.last] == [0, 0]


def test_aborting_at_every_moment_frees_everything() -> None:
    """Waiting, half-way through the prompt, decoding, preempted, finished."""
    for moment in range(25):
        engine, _ = engine_of(num_blocks=10, token_budget=6)
        for index in range(4):
            engine.add(request(f"r{index}", prompt_of(11, seed=index), max_tokens=9))
        answers: dict[tuple[str, int], Answer] = {}
        for _ in range(moment):
            if engine.has_work:
                step(engine, answers)
        for index in (2, 0, 3, 1):
            ended = (f"r{index}", 0) in answers and answers[f"r{index}", 0].finish is not None
            assert engine.abort(f"r{index}") is not ended
            engine.check_integrity()
            assert not engine.abort(f"r{index}")
        assert not engine.has_work
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
        assert stats.blocks_free + stats.blocks_cached == 10


def test_an_unknown_request_can_be_aborted() -> None:
    engine, _ = engine_of()
    assert not engine.abort("nobody")


def test_an_id_can_be_used_again_after_its_end() -> None:
    engine, _ = engine_of()
    asked = request("a", prompt_of(9))
    assert run(engine, asked)[0].token_ids == run(engine, asked)[0].token_ids


# What goes wrong


def test_a_poisonous_request_fails_alone() -> None:
    engine, _ = engine_of()
    good = [request(f"g{index}", prompt_of(7, seed=index)) for index in range(3)]
    bad = request("bad", [*prompt_of(5), POISON, 9])
    for one in (*good, bad):
        engine.add(one)
    answers: dict[tuple[str, int], Answer] = {}
    first = step(engine, answers)
    assert [type(failure).__name__ for failure in first.failures] == ["PoisonError", "PoisonError"]
    finish_all(engine, answers)
    for one in good:
        assert answers[one.request_id, 0].token_ids == solo(one).token_ids
    failed = answers["bad", 0]
    assert failed.last is not None
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
    assert good.last is not None
    assert good.last.cached_tokens == 16
    assert good.token_ids == solo(request("good", [*beginning, 9])).token_ids


def test_running_out_of_memory_together_is_no_reason_to_fail_alone() -> None:
    engine, _ = engine_of(most_rows=1)
    asked = [request(f"r{index}", prompt_of(7, seed=index)) for index in range(3)]
    for one in asked:
        engine.add(one)
    first = step(engine)
    assert [type(failure).__name__ for failure in first.failures] == ["OutOfMemoryError"]
    answers: dict[tuple[str, int], Answer] = {}
    for output in first.outputs:
        answers.setdefault((output.request_id, 0), Answer()).take(output)
    finish_all(engine, answers)
    assert [answers[one.request_id, 0].token_ids for one in asked] == [solo(one).token_ids for one in asked]


def test_running_out_of_memory_alone_fails() -> None:
    engine, _ = engine_of(most_rows=0)
    answers = run(engine, request("a", prompt_of(3)), request("b", prompt_of(3)))
    assert [answer.finish for answer in answers] == [Finish.ERROR] * 2
    assert answers[0].last is not None
    assert answers[0].last.error == "OutOfMemoryError: 1 rows don't fit"


def test_logits_that_are_no_numbers_end_their_row_only() -> None:
    engine, _ = engine_of()
    good = request("good", prompt_of(7))
    bad = request("bad", [*prompt_of(9, seed=1), NAN])
    answers = run(engine, good, bad)
    assert answers[0].token_ids == solo(good).token_ids
    assert answers[1].last is not None
    assert (answers[1].finish, answers[1].last.error) == (Finish.ERROR, "non-finite logits")


def test_pages_behind_bad_logits_are_offered_to_nobody() -> None:
    engine, _ = engine_of(token_budget=8)
    beginning = prompt_of(12)
    run(engine, request("bad", [*beginning, NAN]))
    assert engine.stats().blocks_cached == 0
    (good,) = run(engine, request("good", [*beginning, 9]))
    assert good.last is not None
    assert good.last.cached_tokens == 0


def test_an_error_flushes_the_text_and_keeps_the_count() -> None:
    engine = forced([*ids(" ab"), POISON, 9])
    engine.add(request("a", prompt_of(5), stop=("bcd",)))
    answers: dict[tuple[str, int], Answer] = {}
    finish_all(engine, answers)
    answer = answers["a", 0]
    assert (answer.finish, answer.text) == (Finish.ERROR, " abP")
    assert answer.last is not None
    assert (answer.last.start, answer.last.token_ids, answer.last.completion_tokens) == (3, (), 3)


def test_logits_of_the_wrong_shape_are_the_models_failure() -> None:
    class Wrong(PagedModel):
        def forward(self, rows: Sequence[StepRow]) -> torch.Tensor:
            return super().forward(rows)[:, :-1]

    (answer,) = run(engine_over(Wrong(8, BS)), request("a", prompt_of(3)))
    assert answer.last is not None
    assert answer.last.error == "RuntimeError: the model returned logits of shape (1, 63) instead of (1, 64)"


# Admission


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (request("a", []), "the prompt is empty"),
        (request("a", [5, VOCAB]), f"token id {VOCAB}; ids are below {VOCAB}"),
        (request("a", [-1, 5]), "token id -1"),
        (request("a", prompt_of(200)), "has 200 tokens; at most 199 fit"),
        (request("a", [5], max_tokens=0), "max_tokens is 0; it must be at least 1"),
        (request("a", [5], stop=("x", "")), "a stop string is empty"),
        (request("a", [5], sampling=SamplingParams(temperature=-1.0)), "temperature is -1.0"),
        (request("a", [5], sampling=SamplingParams(temperature=float("nan"))), "temperature is nan"),
        (request("a", [5], sampling=SamplingParams(temperature=float("inf"))), "temperature is inf"),
        (request("a", [5], sampling=SamplingParams(top_p=0.0)), "top_p is 0.0"),
        (request("a", [5], sampling=SamplingParams(top_p=float("nan"))), "top_p is nan"),
        (request("a", [5], sampling=SamplingParams(top_p=1.1)), "top_p is 1.1"),
        (request("a", [5], sampling=SamplingParams(top_k=-1)), "top_k is -1"),
        (request("a", [5], sampling=SamplingParams(seed=-1)), "seed is -1"),
        (request("a", [5], sampling=SamplingParams(seed=2**64)), "seed is 18446744073709551616"),
    ],
)
def test_what_can_never_run_is_refused_and_leaves_no_trace(asked: Request, message: str) -> None:
    engine, _ = engine_of()
    with pytest.raises(AdmissionError, match=message):
        engine.add(asked)
    assert not engine.has_work
    assert not engine.abort("a")
    assert run(engine, request("a", [5]))[0].finish is Finish.LENGTH


def test_a_request_that_is_running_is_not_taken_in_twice() -> None:
    engine, _ = engine_of()
    engine.add(request("a", prompt_of(3)))
    with pytest.raises(AdmissionError, match="running already"):
        engine.add(request("a", prompt_of(5)))
    assert set(finish_all(engine)) == {("a", 0)}


def test_model_and_pool_must_have_the_same_blocks() -> None:
    scheduler = Scheduler(BlockPool(8, BS), max_running=1, token_budget=1, context_length=9)
    with pytest.raises(ValueError, match="the model has 9 blocks of 4 tokens, the pool 8 of 4"):
        Engine(
            PagedModel(9, BS), scheduler, sampler=sample, text_stream=TABLE.stream, eos_token_ids=[], fingerprint="x"
        )


# Figures


def test_the_figures_of_steps() -> None:
    engine, _ = engine_of(num_blocks=8, max_running=2)
    for name in "abc":
        engine.add(request(name, prompt_of(6, seed=ord(name)), max_tokens=2))
    before = engine.stats()
    assert (before.running, before.waiting, before.blocks_free) == (0, 3, 8)
    first = step(engine).stats
    assert (first.tokens, first.sequences, first.running, first.waiting) == (12, 2, 2, 1)
    assert (first.blocks_free, first.blocks_cached, first.blocks_used) == (4, 0, 4)
    assert (first.prefix_queried, first.prefix_hit, first.evictions, first.preemptions) == (12, 0, 0, 0)
    second = step(engine).stats
    assert (second.tokens, second.sequences, second.running, second.waiting) == (2, 2, 0, 1)
    assert (second.blocks_free, second.blocks_cached, second.blocks_used) == (6, 2, 0)
    finish_all(engine)
    assert engine.stats().blocks_cached == 3


def test_a_step_without_work_does_nothing() -> None:
    engine, model = engine_of()
    result = step(engine)
    assert (result.outputs, result.stats.tokens, result.stats.sequences, result.failures) == ((), 0, 0, ())
    assert model.steps == []
