"""What this gateway has decided and a reading of Redis may not show."""

from __future__ import annotations

import random

from gateway.cost import Candidate, Work
from gateway.pending import Pending, Promises, added
from gateway.router import Policy, route
from kvstore.block_hash import chain, root
from kvstore.registry import Load

TEN = Load(1, 10, 5, 3)
ROOT = root("f", 4)


def test_a_burst_does_not_herd_on_one_worker() -> None:
    """32 decisions over readings that all began before any charge was visible."""
    for policy in (Policy.PREFIX, Policy.LEAST_LOADED):
        pending, rng = Pending(), random.Random(1)
        readings = [pending.begin_reading() for _ in range(32)]
        taken = []
        for reading in readings:
            unseen = pending.unseen_by(reading)
            candidates = [Candidate(name, name, "ready", "f", unseen.get(name, Load())) for name in "ab"]
            decision = route(candidates, Work(100, 10, 10), policy=policy, refused={}, rng=rng)
            assert decision.chosen is not None
            taken.append(decision.chosen.candidate.worker)
            pending.charge(taken[-1], Load(1, 110, 100))
            pending.end_reading(reading)
        assert (taken.count("a"), taken.count("b")) == (16, 16)


def test_a_charge_counts_for_readings_that_began_before_it_was_settled() -> None:
    pending = Pending()
    early = pending.begin_reading()
    charge = pending.charge("a", TEN)
    during = pending.begin_reading()
    pending.settle(charge, applied=True)
    late = pending.begin_reading()
    assert pending.unseen_by(early) == {"a": TEN}
    assert pending.unseen_by(during) == {"a": TEN}
    assert pending.unseen_by(late) == {}
    for reading in (early, during):
        pending.end_reading(reading)
    assert len(pending) == 0
    pending.end_reading(late)


def test_a_charge_that_was_declined_counts_for_nobody() -> None:
    pending = Pending()
    reading = pending.begin_reading()
    charge = pending.charge("a", TEN)
    assert pending.unseen_by(reading) == {"a": TEN}
    pending.settle(charge, applied=False)
    assert pending.unseen_by(reading) == {}
    pending.end_reading(reading)


def test_equal_charges_are_kept_apart_and_add_up() -> None:
    pending = Pending()
    reading = pending.begin_reading()
    first, second = pending.charge("a", TEN), pending.charge("a", TEN)
    assert pending.unseen_by(reading) == {"a": added(TEN, TEN)} == {"a": Load(2, 20, 10, 6)}
    pending.settle(first, applied=False)
    assert pending.unseen_by(reading) == {"a": TEN}
    pending.settle(second, applied=True)
    pending.end_reading(reading)
    assert len(pending) == 0


def test_nothing_is_kept_when_nobody_reads() -> None:
    pending = Pending()
    pending.settle(pending.charge("a", TEN), applied=True)
    assert len(pending) == 0


def test_a_prefix_is_promised_as_far_as_the_prompts_agree() -> None:
    promises = Promises()
    promises.make("a", chain(ROOT, range(40), 4))
    for common in range(0, 41, 4):
        prompt = [*range(common), *range(100, 160)]
        assert promises.held("a", chain(ROOT, prompt, 4)) == common // 4
    assert promises.held("a", chain(ROOT, range(40), 4)) == 10
    assert promises.held("a", chain(ROOT, range(12), 4)) == 3
    assert promises.held("a", []) == 0
    assert promises.held("b", chain(ROOT, range(40), 4)) == 0


def test_what_several_promise_stands_until_the_last_is_forgotten() -> None:
    promises = Promises()
    short, long = chain(ROOT, range(8), 4), chain(ROOT, range(40), 4)
    first, second = promises.make("a", long), promises.make("a", short)
    assert ("a" in promises.incarnations, "b" in promises.incarnations) == (True, False)
    promises.forget(first)
    assert promises.held("a", long) == 2
    promises.forget(first)
    assert promises.held("a", long) == 2
    promises.forget(second)
    assert (promises.held("a", long), len(promises)) == (0, 0)
    assert "a" not in promises.incarnations


def test_the_oldest_promises_go_when_there_are_too_many() -> None:
    promises = Promises(most=20)
    prompts = [chain(ROOT, range(start, start + 40), 4) for start in (0, 100, 200)]
    made = [promises.make("a", prompt) for prompt in prompts]
    assert [promises.held("a", prompt) for prompt in prompts] == [0, 10, 10]
    for each in made:
        promises.forget(each)
    assert len(promises) == 0
    assert promises.held("a", prompts[2]) == 0


def test_one_that_is_too_long_alone_is_no_promise() -> None:
    promises = Promises(most=5)
    prompt = chain(ROOT, range(40), 4)
    promises.forget(promises.make("a", prompt))
    assert (promises.held("a", prompt), len(promises)) == (0, 0)
