"""Whatever arrives and leaves in whatever order, on whatever pool: the books balance and every answer is its own."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.page import names_of
from tests.unit.worker.engine_run import BS, Answer, engine_of, solo_choices
from tests.unit.worker.paged_model import EOS, NAN, POISON, VOCAB
from worker.params import AdmissionError, SamplingParams, StopParams
from worker.scheduling.block import EventKind
from worker.sequence import Finish, Request, Sequence, Status

if TYPE_CHECKING:
    from kvstore.block_hash import BlockHash
    from worker.step import Output, Spilled

PREFIXES = [tuple(4 + (piece * 7 + slot) % (VOCAB - 4) for slot in range(BS)) for piece in range(3)]
MUCH, MOST_LIVE = 9999, 8


@cache
def alone(request: Request) -> list[Answer]:
    """The answer of a request that is alone on a large, cold pool."""
    return solo_choices(request)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, ...]:
    """Some shared blocks, then a few tokens of its own or none; seldom one that breaks the model."""
    head = draw(st.lists(st.sampled_from(PREFIXES), max_size=3))
    tail = draw(st.lists(st.integers(4, 7), min_size=0 if head else 1, max_size=5))
    bad = draw(st.sampled_from([[]] * 18 + [[POISON], [NAN]]))
    return (*(token for piece in head for token in piece), *tail, *bad)


samplings = st.sampled_from(
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, repetition_penalty=1.5, logit_bias=((EOS, 6.0), (20, 3.0))),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.8, top_p=0.9, min_p=0.01, seed=2, frequency_penalty=1.0),
        SamplingParams(temperature=2.0, top_k=5, seed=3, presence_penalty=-1.0, logit_bias=((9, 4.0),)),
    ]
)


@st.composite
def stoppings(draw: st.DrawFn) -> StopParams:
    max_tokens = draw(st.integers(1, 20))
    return StopParams(
        max_tokens,
        min_tokens=draw(st.sampled_from([0, 0, max_tokens // 2, max_tokens])),
        stop=draw(st.sampled_from([(), (), (" a",), ("e", "🙂"), ("xyz",)])),
        stop_token_ids=draw(st.sampled_from([(), (), tuple(range(9, 25)), (EOS,)])),
        ignore_eos=draw(st.booleans()),
        include_stop=draw(st.booleans()),
    )


requests = st.builds(
    Request,
    st.just("solo"),
    prompts(),
    samplings,
    stoppings(),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    logprobs=st.sampled_from([None, None, 0, 2]),
    prompt_logprobs=st.sampled_from([None, None, None, 0, 2]),
)


class Traffic(RuleBasedStateMachine):
    """Random arrivals and aborts between steps, on a machine that is short of memory now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, dict[int, Answer]] = defaultdict(lambda: defaultdict(Answer))
        self.live: dict[str, set[int]] = {}  # choices that have not ended, by request
        self.offered: set[object] = set()
        self.store: dict[BlockHash, Spilled] = {}  # all pages that left the pool and are not in doubt

    @initialize(
        num_blocks=st.integers(4, 12),
        max_running=st.integers(1, 5),
        token_budget=st.integers(1, 24),
        chunk_tokens=st.none() | st.integers(1, 12),
        cache_blocks=st.none() | st.integers(0, 6),
        paging=st.sampled_from([True, True, False]),
    )
    def start(
        self,
        num_blocks: int,
        max_running: int,
        token_budget: int,
        chunk_tokens: int | None,
        cache_blocks: int | None,
        paging: bool,
    ) -> None:
        self.engine, self.model = engine_of(
            num_blocks,
            max_running=max_running,
            token_budget=token_budget,
            chunk_tokens=chunk_tokens,
            cache_blocks=cache_blocks,
            context_length=10_000,
            paging=paging,
        )
        if self.engine.paging is not None:
            self.engine.paging.leave = MUCH
        self.scheduler = self.engine._scheduler
        self.token_budget = token_budget

    @precondition(lambda self: len(self.live) < MOST_LIVE)
    @rule(
        several=st.lists(
            st.tuples(requests, st.sampled_from(["", "", "s"]), st.sampled_from([0, 0, 0, -1, 1, 2])),
            min_size=1,
            max_size=3,
        )
    )
    def arrive(self, several: list[tuple[Request, str, int]]) -> None:
        for request, salt, priority in several:
            name = f"r{len(self.requests)}"
            fits = len(request.prompt) < self.engine.context_length
            named = replace(request, request_id=name, salt=salt, priority=priority)
            try:
                self.engine.add(named)
            except AdmissionError:
                assert not fits
                continue
            assert fits
            self.requests[name] = named
            self.live[name] = set(range(request.n))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        assert self.engine.abort(name)
        assert not self.engine.abort(name)
        del self.live[name]
        self.answers.pop(name, None)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        """Of a request only what it has told is left, and from that it goes on."""
        name = data.draw(st.sampled_from(sorted(self.live)))
        assert self.engine.abort(name)
        said = {choice: answer.token_ids for choice, answer in self.answers[name].items()}
        self.engine.add(self.requests[name], said, {*range(self.requests[name].n)} - self.live[name])

    @rule(most_tokens=st.sampled_from([1, 3, 9, MUCH, MUCH]), most_rows=st.sampled_from([1, 2, MUCH]))
    def memory(self, most_tokens: int, most_rows: int) -> None:
        self.model.most_tokens, self.model.most_rows = most_tokens, most_rows

    @rule()
    def clear_cache(self) -> None:
        self.scheduler.pool.clear()

    @precondition(lambda self: self.engine.paging is not None)
    @rule(leave=st.sampled_from([0, 1, 3, MUCH, MUCH]))
    def leave_to_read(self, leave: int) -> None:
        self.engine.paging.leave = leave

    @precondition(lambda self: self.store)
    @rule(data=st.data(), evict=st.booleans(), shuffle=st.sampled_from([False, False, False, True]))
    def adopt(self, data: st.DataObject, evict: bool, shuffle: bool) -> None:
        """Pages come back: a whole prefix, what is left of one, or pages in no order at all."""
        pool, pages = self.scheduler.pool, []
        hash_ = data.draw(st.sampled_from(sorted(self.store)))
        while hash_ in self.store:
            pages.insert(0, self.store[hash_])
            hash_ = pages[0].name.parent
        pages = pages[data.draw(st.integers(0, len(pages) - 1)) :]
        if shuffle:
            pages = data.draw(st.permutations(pages))
        before = {pool.hash_of(block) for block in range(pool.total)}
        taken = self.engine.paging.adopt(*zip(*pages, strict=True), evict=evict)
        self.engine.check_integrity()
        offered = {pool.hash_of(block) for block in range(pool.total)}
        kept = {page.name.hash for page in pages[:taken]}
        if pool.cache_blocks == pool.total:
            assert kept <= offered
        if not evict:
            assert before - {None} <= offered, "evicted something"

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.one_step()

    def one_step(self) -> None:
        running = [*self.scheduler.running]
        # When memory has run out a step may have fewer tokens than there are streams; they take turns then.
        streams = [(one, one.preemptions) for one in running if one.num_uncomputed == 1] if self.roomy() else []
        best = self.best(running)
        before = (best.num_computed, best.num_output) if best else (0, 0)
        result = self.engine.step()
        self.engine.check_integrity()
        for page in result.spilled:
            self.spill(page)
        for hash_ in result.doubted:
            self.store.pop(hash_, None)
        assert {type(failure).__name__ for failure in result.failures} <= {"PoisonError", "OutOfMemoryError"}
        assert bool(result.stats.tokens) == bool(self.live)
        assert result.stats.tokens <= self.token_budget
        for output in result.outputs:
            self.take(output)
        told = {(output.request_id, output.choice) for output in result.outputs}
        for one, preemptions in streams:
            # One that lost its blocks to a better standing may have come back in the same step, by blocks of that one.
            assert (one.request.request_id, one.choice) in told or one.preemptions > preemptions, "passed over"
        if best is not None and best.status is not Status.FINISHED:
            assert best.status is Status.RUNNING, "the best was preempted"
            assert (best.num_computed, best.num_output) > before
        for event in result.events:
            if event.kind is EventKind.CLEARED:
                self.offered.clear()
            else:
                (self.offered.add if event.kind is EventKind.STORED else self.offered.remove)(event.hash)
        pool = self.scheduler.pool
        assert self.offered == {pool.hash_of(block) for block in range(pool.total)} - {None}

    def spill(self, page: Spilled) -> None:
        """It is what its name says, from its first token on."""
        tokens = self.model.tokens_of(page.payload)
        assert len(tokens) == (page.name.position + 1) * BS
        assert page.name in {
            name for salt in ("", "s") for name in names_of(self.engine.root_of(salt), tuple(tokens), BS)
        }
        self.store[page.name.hash] = page

    def roomy(self) -> bool:
        return self.scheduler.token_budget > len(self.scheduler.running)

    def best(self, running: list[Sequence]) -> Sequence | None:
        """The running sequence that nobody may displace, if there is one."""
        if not running or not self.roomy():
            return None
        waiting = min((one.standing for one in self.scheduler.waiting), default=running[0].standing)
        return running[0] if running[0].standing <= waiting else None

    def take(self, output: Output) -> None:
        open_choices = self.live[output.request_id]
        assert output.choice in open_choices
        assert output.cached_tokens < output.prompt_tokens
        self.answers[output.request_id][output.choice].take(output)
        if output.finish is not None:
            open_choices.remove(output.choice)
            if not open_choices:
                del self.live[output.request_id]

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()
            stats = self.engine.stats()
            assert stats.blocks_free + stats.blocks_cached + stats.blocks_used == self.scheduler.pool.total
            assert stats.prefix_hit <= stats.prefix_queried
            assert self.engine.has_work == bool(self.live)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            if not self.live:
                break
            self.one_step()
        assert not self.live, "no end"
        assert self.engine.stats().blocks_used == 0
        for name, choices in self.answers.items():
            expected = alone(replace(self.requests[name], request_id="solo", salt="", priority=0))
            assert sorted(choices) == list(range(len(expected)))
            for choice, answer in choices.items():
                self.check_answer(answer, expected[choice])

    def check_answer(self, answer: Answer, expected: Answer) -> None:
        room = self.engine.context_length - expected.last.prompt_tokens
        if len(expected.token_ids) > room:  # this pool's context ended it
            assert (answer.token_ids, answer.finish) == (expected.token_ids[:room], Finish.LENGTH)
            assert answer.logprobs == expected.logprobs[:room]
            assert answer.prompt_logprobs == expected.prompt_logprobs
        else:
            assert answer.said == expected.said


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=100, stateful_step_count=30)
