"""`octavo tune`, over steps whose times follow a rule."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest

from bench import tune
from bench.tune import Point, Variant, by_round, points_of, ratio, run_tune, variants_of
from bench.tune_proposal import propose
from tests.unit.bench.tune_made import SMALL, InterruptedSubject, RuledSubject, known_waste


@pytest.fixture(autouse=True)
def _waste_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "measure_waste", known_waste)


def test_every_variant_at_every_kind_of_step() -> None:
    notes: list[str] = []
    subject = RuledSubject()
    results = run_tune(SMALL, subject, notes.append)  # type: ignore[arg-type]
    assert [(each["block_size"], each["block_run"], each["state"]) for each in results["variants"]] == [
        *((16, 1, state) for state in ("pieces", "fresh", "worn")),
        *((16, 8, state) for state in ("fresh", "worn")),
        *((32, 1, state) for state in ("pieces", "fresh", "worn")),
        *((32, 8, state) for state in ("fresh", "worn")),
    ]
    by_variant = {(each["block_size"], each["block_run"], each["state"]): each for each in results["variants"]}
    for each in results["variants"]:
        assert [(step["sequences"], step["context"]) for step in each["steps"]] == [
            (1, 64),
            (3, 64),
            (1, 320),
            (3, 320),
        ]
        assert all(step["least_ms"] == step["median_ms"] == step["most_ms"] for step in each["steps"])
        assert each["unused"] == known_waste(requests=1, seed=0, block_size=each["block_size"]).unused
    # 20 blocks each, of which 10 are a prompt and lie together; then they grow in turn.
    assert by_variant[16, 1, "fresh"]["steps"][3]["median_ms"] == 3 + 3 * 10
    assert by_variant[16, 8, "fresh"]["neighbours"] > by_variant[16, 1, "fresh"]["neighbours"] > 0.5
    assert by_variant[16, 1, "worn"]["ratio"] == 1
    assert by_variant[16, 1, "pieces"]["ratio"] >= 1 > by_variant[32, 8, "fresh"]["ratio"]
    assert notes[0] == "10 variants, 4 kinds of steps; 3 rounds of 2 steps each"
    assert notes[1:3] == [f"waste with blocks of {size}: 1 requests of all lengths" for size in (16, 32)]
    assert notes[3:] == ["round 1 of 3", "round 2 of 3", "round 3 of 3"]
    assert (results["rounds"], results["interrupted"]) == (3, False)
    assert len(subject.asked) == 10 * 4 * 3 * (2 + 1)
    json.dumps(results)


def test_variants_take_turns_in_another_order_in_each_round() -> None:
    subject = RuledSubject()
    run_tune(replace(SMALL, contexts=(64,), sequences=(1,), steps=1), subject, print)  # type: ignore[arg-type]
    rounds = [subject.asked[start : start + 20] for start in range(0, 60, 20)]
    assert all(sorted(each) == sorted(rounds[0]) for each in rounds)
    assert len({tuple(each) for each in rounds}) == 3


def test_the_first_step_of_a_turn_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    times = cycle([9.0, 1.0, 3.0])
    monkeypatch.setattr(RuledSubject, "step", lambda *_: next(times))
    results = run_tune(SMALL, RuledSubject(), print)  # type: ignore[arg-type]
    assert {step["median_ms"] for each in results["variants"] for step in each["steps"]} == {2000.0}


def test_what_has_no_room_is_left_out_and_told() -> None:
    notes: list[str] = []
    config = replace(SMALL, contexts=(64, 512, 5000), sequences=(1, 5))
    assert points_of(config, 4096, notes.append) == [Point(64, 1), Point(64, 5), Point(512, 1)]
    assert notes == [
        "5 x 512 is left out: the pages hold 2048 tokens",
        "1 x 5000 is left out: the model's context is 4096",
        "5 x 5000 is left out: the model's context is 4096",
    ]
    with pytest.raises(ValueError, match="no step of these sizes"):
        points_of(replace(config, contexts=(5000,)), 4096, notes.append)


def test_runs_of_one_are_always_measured_and_once() -> None:
    assert [variant.block_run for variant in variants_of(replace(SMALL, block_sizes=(16,), block_runs=(1,)))] == [1] * 3


def test_a_ratio_is_that_of_the_same_rounds() -> None:
    """A machine that gets slower in the second round doesn't count."""
    one, other = Variant(16, 1, "worn"), Variant(32, 1, "worn")
    near, far = Point(64, 1), Point(512, 1)
    times = {
        (one, near): [1.0, 4.0, 1.0],
        (other, near): [2.0, 8.0, 2.0],
        (one, far): [3.0] * 3,
        (other, far): [1.5] * 3,
    }
    assert ratio(times, one, other, [near]) == 0.5
    assert ratio(times, one, other, [far]) == 2.0
    assert ratio(times, one, other, [near, far]) == pytest.approx(1.0)
    assert by_round({**times, (one, near): [1.0, 8.0, 1.0]}, one, other, [near, far]) == pytest.approx([1, 2**0.5, 1])


# What is proposed


def proposed(*settings: tuple[int, int, float, float], high: float = 0.0) -> tuple[int, int, str]:
    """From size, run, ratio and unused; in one of four rounds the ratio was ``high``. In other states all are fast."""
    names = ("block_size", "block_run", "ratio", "unused")
    worn = [{**dict(zip(names, setting, strict=True)), "state": "worn", "ratio_p75": high} for setting in settings]
    found = propose([*worn, *({**each, "state": "fresh", "ratio": 0.1} for each in worn)], 0.04)
    return found["block_size"], found["block_run"], found["reason"]


def test_what_gains_nothing_is_not_proposed() -> None:
    assert proposed((16, 1, 1.0, 0.034), (16, 16, 0.985, 0.034), (32, 1, 1.01, 0.07)) == (
        *(16, 1),
        "Steps take 1.000 of the time of the smallest blocks without runs, and 3.4% of the slots are unused. "
        "Nothing is faster by more than noise.",
    )


def test_what_is_faster_is() -> None:
    assert proposed((16, 1, 1.0, 0.034), (16, 4, 0.955, 0.034), (16, 16, 0.95, 0.034))[:2] == (16, 4)
    assert proposed((16, 1, 1.0, 0.02), (16, 4, 0.95, 0.02), (32, 1, 0.9, 0.039))[:2] == (32, 1)


def test_what_is_faster_only_now_and_then_is_not() -> None:
    size, run, reason = proposed((16, 1, 1.0, 0.034), (16, 4, 0.9, 0.034), high=1.01)
    assert (size, run) == (16, 1)
    assert reason.endswith("Blocks of 16 in runs of 4 take 0.900, but not in most rounds: measure again with more.")


def test_what_wastes_memory_is_told_and_not_proposed() -> None:
    size, run, reason = proposed((16, 1, 1.0, 0.034), (32, 1, 0.9, 0.07))
    assert (size, run) == (16, 1)
    assert reason.endswith("Blocks of 32 in runs of 1 are faster (0.900), but leave 7.0% unused: 4% may be.")


def test_the_smallest_blocks_may_waste_what_they_must() -> None:
    assert proposed((16, 1, 1.0, 0.2), (32, 1, 0.5, 0.3))[:2] == (16, 1)
    assert proposed((16, 1, 1.0, 0.2), (16, 4, 0.9, 0.2), (32, 1, 0.5, 0.3))[:2] == (16, 4)


STEPS = 10 * 4 * (2 + 1)
"""Of a round of `SMALL`."""


def test_an_interrupted_run_keeps_its_whole_rounds() -> None:
    kept: list[dict[str, Any]] = []
    whole = run_tune(SMALL, RuledSubject(), print, kept.append)  # type: ignore[arg-type]
    assert [(each["rounds"], each["interrupted"]) for each in kept] == [(1, True), (2, True), (3, False)]
    results = run_tune(SMALL, InterruptedSubject(3 * STEPS), print)  # type: ignore[arg-type]
    assert (results["rounds"], results["interrupted"]) == (2, True)
    assert results["variants"] == whole["variants"]  # whose times are the same in each round
    assert results["proposal"] == whole["proposal"]
    with pytest.raises(KeyboardInterrupt):
        run_tune(SMALL, InterruptedSubject(STEPS), print)  # type: ignore[arg-type]
