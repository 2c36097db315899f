"""Whatever arrives and leaves in whatever order, on whatever pool: the books balance and every answer is its own."""

from __future__ import annotations

from functools import cache

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.worker.paged_model import EOS, NAN, POISON, TABLE, VOCAB, PagedModel
from worker.block_pool import BlockPool
from worker.engine import AdmissionError, Engine, Output
from worker.params import SamplingParams, StopParams
from worker.sampler import sample
from worker.scheduler import Scheduler
from worker.sequence import Finish, Request

BS = 4
PREFIXES = [tuple(4 + (piece * 7 + slot) % (VOCAB - 4) for slot in range(BS)) for piece in range(3)]


def build(num_blocks: int, max_running: int, token_budget: int) -> tuple[Engine, Scheduler]:
    scheduler = Scheduler(
        BlockPool(num_blocks, BS), max_running=max_running, token_budget=token_budget, context_length=10_000
    )
    engine = Engine(
        PagedModel(num_blocks, BS),
        scheduler,
        sampler=sample,
        text_stream=TABLE.stream,
        eos_token_ids=[EOS],
        fingerprint="paged model",
    )
    return engine, scheduler


@cache
def solo(request: Request) -> tuple[tuple[int, ...], str, Finish | None, str, str]:
    """The answer of a request that is alone on a large, cold pool."""
    engine, _ = build(64, 1, 1000)
    engine.add(request)
    outputs: list[Output] = []
    while engine.has_work:
        outputs += engine.step().outputs
    return joined(outputs)


def joined(outputs: list[Output]) -> tuple[tuple[int, ...], str, Finish | None, str, str]:
    tokens: tuple[int, ...] = ()
    for output in outputs:
        assert output.start == len(tokens)
        assert output.first == (output is outputs[0])
        tokens += output.token_ids
    last = outputs[-1]
    assert all(output.finish is None for output in outputs[:-1])
    return tokens, "".join(output.text for output in outputs), last.finish, last.stop_match, last.error


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, ...]:
    """Some shared blocks, then a few tokens of its own; seldom one that breaks the model."""
    head = draw(st.lists(st.sampled_from(PREFIXES), max_size=3))
    tail = draw(st.lists(st.integers(4, 7), min_size=1, max_size=5))
    bad = draw(st.sampled_from([[]] * 18 + [[POISON], [NAN]]))
    return (*(token for piece in head for token in piece), *tail, *bad)


samplings = st.sampled_from(
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.8, top_p=0.9, seed=2),
        SamplingParams(temperature=2.0, top_k=5, seed=3),
    ]
)
stoppings = st.builds(
    StopParams,
    max_tokens=st.integers(1, 12),
    stop=st.sampled_from([(), (), (" a",), ("e", "🙂"), ("xyz",)]),
    ignore_eos=st.booleans(),
    include_stop=st.booleans(),
)


class Traffic(RuleBasedStateMachine):
    """Random arrivals and aborts between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[Output]] = {}
        self.live: list[str] = []

    @initialize(num_blocks=st.integers(4, 14), max_running=st.integers(1, 5), token_budget=st.integers(1, 24))
    def start(self, num_blocks: int, max_running: int, token_budget: int) -> None:
        self.engine, self.scheduler = build(num_blocks, max_running, token_budget)

    @rule(prompt=prompts(), sampling=samplings, stopping=stoppings, salt=st.sampled_from(["", "", "s"]))
    def arrive(self, prompt: tuple[int, ...], sampling: SamplingParams, stopping: StopParams, salt: str) -> None:
        name = f"r{len(self.requests)}"
        request = Request(name, prompt, sampling, stopping, salt)
        fits = len(prompt) < self.engine.context_length
        try:
            self.engine.add(request)
        except AdmissionError:
            assert not fits
            return
        assert fits
        self.requests[name] = request
        self.live.append(name)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.live))
        assert self.engine.abort(name)
        self.live.remove(name)
        self.outputs.pop(name, None)

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.one_step()

    def one_step(self) -> None:
        owed = {one.request.request_id for one in self.scheduler.running if one.num_uncomputed == 1}
        oldest = self.scheduler.running[0] if self.scheduler.running else None
        progress = (oldest.num_computed, oldest.num_output) if oldest else (0, 0)
        result = self.engine.step()
        self.engine.check_integrity()
        assert bool(result.stats.tokens) == bool(self.live)
        assert result.stats.tokens <= self.scheduler.token_budget
        for output in result.outputs:
            assert output.request_id in self.live
            self.outputs.setdefault(output.request_id, []).append(output)
            if output.finish is not None:
                self.live.remove(output.request_id)
        told = {output.request_id for output in result.outputs}
        preempted = {one.request.request_id for one in self.scheduler.waiting}
        assert owed <= told | preempted, "a stream was passed over"
        if oldest is not None and oldest.request.request_id in self.live:
            assert oldest in self.scheduler.running, "the oldest was preempted"
            assert (oldest.num_computed, oldest.num_output) > progress

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
        for name, outputs in self.outputs.items():
            self.check_answer(self.requests[name], outputs)

    def check_answer(self, request: Request, outputs: list[Output]) -> None:
        tokens, text, finish, stop_match, error = joined(outputs)
        expected = solo(Request("solo", request.prompt, request.sampling, request.stopping))
        room = self.engine.context_length - len(request.prompt)
        if len(expected[0]) > room:  # this pool's context ended it
            assert (tokens, finish) == (expected[0][:room], Finish.LENGTH)
        else:
            assert (tokens, text, finish, stop_match, error) == expected


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
