"""Whatever arrives, forks and leaves in whatever order, on whatever pool: every page holds what its readers expect."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.worker.scheduler_world import POISONED, World
from worker.params import AdmissionError

if TYPE_CHECKING:
    from worker.scheduler import Scheduled

TOKENS = st.integers(0, 2)


class Traffic(RuleBasedStateMachine):
    """Random arrivals, ends and mishaps between steps, and in them."""

    world: World | None = None

    @initialize(
        num_blocks=st.integers(1, 14),
        block_size=st.sampled_from([1, 2, 4]),
        max_running=st.integers(1, 5),
        token_budget=st.integers(1, 24),
        chunk_tokens=st.sampled_from([None, 1, 3, 8]),
        cache_blocks=st.sampled_from([None, None, 0, 1, 3]),
        logit_rows=st.sampled_from([1, 3, 128]),
        hash_bits=st.sampled_from([256, 256, 8]),
    )
    def start(self, **limits: int) -> None:
        self.world = World(**limits)

    @rule(
        head=st.lists(st.sampled_from([(0, 0, 0, 0), (1, 2, 1, 2)]), max_size=3),
        tail=st.lists(TOKENS, max_size=6),
        max_tokens=st.integers(1, 12),
        priority=st.sampled_from([0, 0, 0, 1, 5, -3]),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        salt=st.sampled_from(["", "", "s"]),
        scored=st.sampled_from([False, False, False, True]),
    )
    def arrive(self, head: list[tuple[int, ...]], tail: list[int], **rest: object) -> None:
        assert self.world is not None
        prompt = (*(token for piece in head for token in piece), *tail) or (0,)
        fits = len(prompt) < self.world.scheduler.context_length
        try:
            self.world.add(prompt, **rest)  # type: ignore[arg-type]
        except AdmissionError:
            assert not fits
        else:
            assert fits

    @precondition(lambda self: self.world and self.world.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        assert self.world is not None
        self.world.end(data.draw(st.sampled_from([*self.world.live])))

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        assert self.world is not None
        for _ in range(count):
            self.world.step()

    @rule(data=st.data())
    def step_with_mishaps(self, data: st.DataObject) -> None:
        """Memory runs out for some, others fail."""

        def outcome(entry: Scheduled) -> int:
            return data.draw(st.one_of(st.integers(0, entry.num_tokens), st.just(POISONED)))

        assert self.world is not None
        self.world.step(outcome)

    @precondition(lambda self: self.world and len(self.world.scheduler.running))
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        assert self.world is not None
        sequence = data.draw(st.sampled_from([*self.world.scheduler.running]))
        if sequence.block_table:
            self.world.pool.forget([data.draw(st.sampled_from(sequence.block_table))])

    @rule()
    def clear(self) -> None:
        assert self.world is not None
        self.world.pool.clear()

    @rule()
    def shrink(self) -> None:
        assert self.world is not None
        self.world.scheduler.shrink()

    @invariant()
    def all_is_well(self) -> None:
        if self.world is not None:
            self.world.check()

    def teardown(self) -> None:
        if self.world is not None:
            self.world.finish()
            self.world.close()


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
