"""Decisions as they are kept."""

from __future__ import annotations

import random

import pytest

from gateway.cost import BUSY_STEPS, Candidate, Rates, Work
from gateway.prefixes import Index
from gateway.record import MOST_CANDIDATES, record_of
from gateway.router import Policy, route
from kvstore.registry import Load
from octavo.v1 import fleet_pb2

RATES = Rates(prefill_tok_s=500.0, step_s=0.25, sequence_s=0.125, fetch_tok_s=1000.0)


def test_a_record_has_all_that_a_decision_was_made_from_and_what_it_came_to() -> None:
    held = Candidate(
        "a", "a-1", "ready", "f", Load(1, 700, 250, 2), RATES, 512, 256, max_running=8, kv_tokens=4096, used=48
    )
    full = Candidate("b", "b-1", "ready", "f", Load(9, 9, 9), RATES)
    work = Work(prompt=1000, answer=4, others=8, choices=2)
    decision = route([full, held], work, policy=Policy.PREFIX, refused={"b-1": "full"}, rng=random.Random(0))
    record = record_of(decision, "r1", Index.DEGRADED, 1234)
    assert (record.request_id, record.policy, record.index, record.decided_unix_ms) == (
        "r1",
        "prefix",
        "degraded",
        1234,
    )
    assert (record.prompt_tokens, record.answer_tokens, record.choices, record.mean_answer_tokens) == (1000, 8, 2, 8)
    assert record.predicted_cached_tokens == 512 + 256
    assert (record.chosen, [each.verdict for each in record.candidates]) == (1, ["full", "chosen"])
    assert record.candidates[1] == fleet_pb2.Candidate(
        worker="a",
        incarnation="a-1",
        held_tokens=512,
        stored_tokens=256,
        jobs=1,
        sequences=2,
        tokens=700,
        prefill_tokens=250,
        prefill_tokens_per_s=500,
        step_ms=250,
        sequence_ms=125,
        fetch_tokens_per_s=1000,
        max_running=8,
        kv_tokens=4096,
        used_tokens=48,
        verdict="chosen",
        wait_s=0.5 + BUSY_STEPS * 0.375,
        prefill_s=232 / 500,
        fetch_s=0.256,
        decode_s=4 * (0.25 + 3 * 0.125) + 2 * 2 * 4 * 0.125 + 3 * 0.25 * 232 / 500,
    )


@pytest.mark.parametrize("policy", [Policy.PREFIX, Policy.ROUND_ROBIN])
def test_of_a_large_fleet_the_cheapest_are_kept_and_the_chosen_one_always(policy: Policy) -> None:
    fleet = [
        Candidate(f"w{index:03}", f"i{index}", "ready", "f", Load(1, 1, 1000 * (100 - index))) for index in range(100)
    ]
    decision = route(fleet, Work(10, 1, 1), policy=policy, refused={}, rng=random.Random(0))
    record = record_of(decision, "r", Index.EXACT, 0)
    names = [each.worker for each in record.candidates]
    cheapest = [f"w{index:03}" for index in range(100)][-MOST_CANDIDATES:]
    expected = cheapest if policy is Policy.PREFIX else ["w000", *cheapest[1:]]
    assert names == expected
    assert record.candidates[record.chosen].verdict == "chosen"
    assert len(record.SerializeToString()) < 200 * MOST_CANDIDATES


def test_a_decision_without_a_choice_is_no_record() -> None:
    with pytest.raises(ValueError, match="without a choice"):
        record_of(route([], Work(1, 1, 1), policy=Policy.PREFIX, refused={}, rng=random.Random(0)), "r", Index.EXACT, 0)
