"""Whatever arrives, forks and leaves in whatever order, on whatever pool: every page holds what its readers expect."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.worker.scheduler_world import POISONED, World
from worker.params import AdmissionError

if TYPE_CHECKING:
    from worker.scheduling.plan import Scheduled

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
        block_run=st.sampled_from([1, 1, 2, 4, 16]),
    )
    def start(self, **limits: int) -> None:
        self.world = World(**limits)

    @rule(
        head=st.lists(st.sampled_from([(0, 0, 0, 0), (1, 2, 1, 2)]), max_size=3),
        tail=st.lists(TOKENS, max_size=6),
        max_tokens=st.integers(1, 12),
        priority=st.sampled_from([0, 0, 0, 1, 5, -3]),
        tenant=st.sampled_from(["", "a", "b"]),
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
TestTraffic.settings = settings(max_examples=80, stateful_step_count=40)


def test_thousands_of_steps() -> None:
    """Long lives on all kinds of pools. So that it can't pass for lack of anything happening, that is counted."""
    seen: Counter[str] = Counter()
    for seed in range(40):
        life, _ = long_life(random.Random(seed), steps=120, mishaps=bool(seed % 2))
        seen += life
    assert seen["steps"] > 4800
    assert min(seen[name] for name in ("preemptions", "displacements", "evictions", "hits", "copies", "followers")) > 50


@pytest.mark.parametrize("seed", range(12))
def test_runs_change_nothing_but_which_block_is_taken(seed: int) -> None:
    """Who runs, what is hit, what is evicted and in which order: all as without runs."""
    without, told = long_life(random.Random(seed), steps=80, mishaps=bool(seed % 2))
    for block_run in (2, 3, 8, 1000):
        assert long_life(random.Random(seed), steps=80, mishaps=bool(seed % 2), block_run=block_run) == (without, told)


def long_life(
    rng: random.Random, *, steps: int, mishaps: bool, block_run: int = 1
) -> tuple[Counter[str], list[object]]:
    """What happened how often, and what was scheduled and told."""
    world = World(
        num_blocks=rng.choice([1, 2, 3, 5, 8, 14, 30]),
        block_size=rng.choice([1, 2, 4, 4]),
        max_running=rng.randint(1, 6),
        token_budget=rng.randint(1, 24),
        chunk_tokens=rng.choice([None, 1, 3, 8]),
        cache_blocks=rng.choice([None, None, 0, 1, 3]),
        logit_rows=rng.choice([1, 3, 128]),
        hash_bits=rng.choice([256, 256, 8]),
        block_run=block_run,
    )
    seen: Counter[str] = Counter()

    def outcome(entry: Scheduled) -> int:
        if not mishaps or rng.random() < 0.9:
            return entry.num_tokens
        return rng.choice([POISONED, 0, rng.randint(0, entry.num_tokens)])

    try:
        while world.steps < steps:
            meddle(world, rng, mishaps=mishaps)
            world.step(outcome)
            seen["followers"] += sum(one.awaits is not None for one in world.scheduler.waiting)
        world.finish()
    finally:
        world.close()
    scheduler = world.scheduler
    seen.update(steps=world.steps, copies=world.copies, evictions=world.pool.evictions, hits=scheduler.prefix_hit)
    seen.update(preemptions=scheduler.preemptions, displacements=scheduler.displacements)
    return seen, world.told


def meddle(world: World, rng: random.Random, *, mishaps: bool) -> None:
    """What may happen between two steps."""
    while len(world.live) < rng.randint(0, 12):
        pieces = rng.choices([(0, 0, 0, 0), (1, 2, 1, 2)], k=rng.randint(0, 3))
        prompt = [*(token for piece in pieces for token in piece), *rng.choices(range(3), k=rng.randint(1, 6))]
        if len(prompt) >= world.scheduler.context_length:
            break
        world.add(
            tuple(prompt),
            max_tokens=rng.randint(1, 12),
            priority=rng.choice([0, 0, 0, 1, 5, -3]),
            tenant=rng.choice(["", "a", "b"]),
            n=rng.choice([1, 1, 1, 2, 4]),
            salt=rng.choice(["", "", "s"]),
            scored=rng.random() < 0.2,
        )
    what = rng.random()
    if what < 0.1 and world.live:
        world.end(rng.choice([*world.live]))
    elif mishaps and what < 0.13:
        world.pool.clear()
    elif mishaps and what < 0.16:
        world.scheduler.shrink()
    elif mishaps and what < 0.2 and len(world.scheduler.running):
        world.pool.forget(rng.choice([*world.scheduler.running]).block_table[-2:])


@pytest.mark.parametrize("seed", range(8))
def test_no_full_block_of_a_prompt_is_computed_twice(seed: int) -> None:
    """Whenever its prompts arrive, and however they are cut: with room for all, each prefix costs its tokens once."""
    rng = random.Random(seed)
    world = World(num_blocks=400, max_running=rng.randint(1, 8), token_budget=rng.randint(8, 40))
    prefixes: set[tuple[int, ...]] = set()
    expected = computed = 0
    try:
        for _ in range(60):
            prompt = tuple(rng.choices(range(2), k=rng.randint(1, 14)))
            full = {prompt[:end] for end in range(4, len(prompt) + 1, 4)}
            # The last token is always computed, also when it is the last of a block that is known.
            expected += 4 * len(full - prefixes) + (len(prompt) % 4 or prompt in prefixes)
            prefixes |= full
            world.add(prompt, max_tokens=1)
            for _ in range(rng.choice([0, 0, 1, 2])):
                computed += world.step()
        while world.live:
            computed += world.step()
        assert computed == expected
    finally:
        world.close()


# F03
@pytest.mark.parametrize("max_tokens", [3, 4, 5])
def test_lengths_around_a_whole_block(max_tokens: int) -> None:
    """A pool of six blocks, two hundred requests whose prompts and outputs end just before, at and after a block."""
    world = World(num_blocks=6)
    try:
        for number in range(200):
            head = [(0, 1, 2, 0), (2, 2, 1, 0)][number % 2]
            world.add((*head, *(number // 2 % 3,) * (number % 3 + 3)), max_tokens=max_tokens)
            while len(world.live) > 4:
                world.step()
        world.finish()
        assert world.pool.available == 6
    finally:
        world.close()


# F07
def test_prefixes_whose_hashes_collide_are_kept_apart() -> None:
    """With hashes of one byte nearly all of them do; what each sequence reads is its own all the same."""
    world = World(num_blocks=60, block_size=2, max_running=8, hash_bits=8)
    try:
        for number in range(300):
            world.add(tuple(number // 3**digit % 3 for digit in range(6)), max_tokens=4)
            while len(world.live) > 8:
                world.step()
        hits = world.scheduler.prefix_hit
        world.finish()
        assert hits > 100
        assert world.collisions > 100
    finally:
        world.close()
