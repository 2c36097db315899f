"""Rates follow the steps that a worker makes, and stay numbers whatever these are."""

from __future__ import annotations

import math
import random
from dataclasses import astuple

import pytest

from worker.rates import DECODE_MEMORY, LEAST_PROMPT, MOST_SURPRISE, PROMPT_MEMORY, Measured, Rates

AT_LOAD = Measured(prefill_tok_s=1000.0, step_ms=10.0, sequence_ms=0.5)


def seconds_of(truth: Measured, prompt_tokens: int, decoded: int) -> float:
    more = max(decoded - 1, 0)
    return (truth.step_ms + truth.sequence_ms * more) / 1000 + prompt_tokens / truth.prefill_tok_s


def feed(rates: Rates, truth: Measured, steps: int, *, rng: random.Random, noise: float = 0.0) -> None:
    for _ in range(steps):
        decoded = rng.randrange(1, 33)
        prompt_tokens = rng.choice((0, 0, rng.randrange(16, 257)))
        seconds = seconds_of(truth, prompt_tokens, decoded) * (1 + rng.uniform(-noise, noise))
        rates.step(prompt_tokens=prompt_tokens, decoded=decoded, seconds=seconds)


def test_at_first_what_was_measured_at_load_holds() -> None:
    assert astuple(Rates(AT_LOAD).now) == pytest.approx(astuple(AT_LOAD))


def test_steps_as_expected_change_nothing() -> None:
    rates = Rates(AT_LOAD)
    feed(rates, AT_LOAD, 2000, rng=random.Random(0))
    assert astuple(rates.now) == pytest.approx(astuple(AT_LOAD))


@pytest.mark.parametrize(
    "truth",
    [
        Measured(4000.0, 2.5, 0.1),
        Measured(200.0, 40.0, 2.0),
        Measured(50_000.0, 10.0, 0.01),
        Measured(1000.0, 10.0, 4.0),
    ],
)
def test_what_lasts_is_learnt(truth: Measured) -> None:
    rates = Rates(AT_LOAD)
    feed(rates, truth, 6000, rng=random.Random(1), noise=0.05)
    now = rates.now
    assert now.step_ms == pytest.approx(truth.step_ms, rel=0.15)
    assert now.sequence_ms == pytest.approx(truth.sequence_ms, rel=0.15, abs=0.03)
    assert now.prefill_tok_s == pytest.approx(truth.prefill_tok_s, rel=0.15 if truth.prefill_tok_s < 10_000 else 1.0)


def test_steps_of_one_size_say_nothing_of_what_a_sequence_costs() -> None:
    rates = Rates(AT_LOAD)
    rng = random.Random(2)
    for _ in range(20 * DECODE_MEMORY):
        rates.step(prompt_tokens=0, decoded=1, seconds=0.02 * rng.uniform(0.9, 1.1))
    assert rates.now.step_ms == pytest.approx(20.0, rel=0.05)
    assert rates.now.sequence_ms == pytest.approx(0.5)


def test_a_mean_of_steps_is_kept_when_all_decode_many() -> None:
    rates = Rates(AT_LOAD)
    for _ in range(20 * DECODE_MEMORY):
        rates.step(prompt_tokens=0, decoded=32, seconds=0.05)
    now = rates.now
    assert now.step_ms + 31 * now.sequence_ms == pytest.approx(50.0, rel=0.01)


def test_one_step_that_is_held_up_moves_little() -> None:
    rates = Rates(AT_LOAD)
    rates.step(prompt_tokens=0, decoded=1, seconds=60.0)
    assert rates.now.step_ms == pytest.approx(10 * (1 + (MOST_SURPRISE - 1) / DECODE_MEMORY))
    rates = Rates(AT_LOAD)
    rates.step(prompt_tokens=100, decoded=0, seconds=60.0)
    # 110 ms were expected, 440 are believed, of which 10 are not the prompt's: among 64 like it.
    expected = (PROMPT_MEMORY * 100) / ((PROMPT_MEMORY - 1) * 0.1 + 0.43)
    assert rates.now.prefill_tok_s == pytest.approx(expected)


def test_a_few_prompt_tokens_are_lost_in_the_step() -> None:
    rates = Rates(AT_LOAD)
    rates.step(prompt_tokens=LEAST_PROMPT - 1, decoded=3, seconds=1.0)
    assert astuple(rates.now) == pytest.approx(astuple(AT_LOAD))


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_time_is_not_learnt(seconds: float) -> None:
    rates = Rates(AT_LOAD)
    rates.step(prompt_tokens=100, decoded=1, seconds=seconds)
    rates.step(prompt_tokens=0, decoded=1, seconds=seconds)
    assert astuple(rates.now) == pytest.approx(astuple(AT_LOAD))


@pytest.mark.parametrize("seed", range(10))
def test_rates_are_always_positive_numbers(seed: int) -> None:
    rng = random.Random(seed)
    rates = Rates(Measured(10 ** rng.uniform(-3, 9), 10 ** rng.uniform(-6, 6), 10 ** rng.uniform(-6, 6)))
    for _ in range(3000):
        rates.step(
            prompt_tokens=rng.choice((0, 0, 1, 17, 512, 100_000)),
            decoded=rng.choice((0, 1, 2, 32, 4096)),
            seconds=10 ** rng.uniform(-9, 5),
        )
        assert all(0 < value < math.inf for value in astuple(rates.now))
