"""How often a beginning is asked for, and whether by most."""

from __future__ import annotations

import math
import random

import pytest

from gateway.repeats import ModelRepeats, Repeats
from kvstore.block_hash import BlockHash

ONE, OTHER, THIRD = (BlockHash(name * 32) for name in (b"1", b"2", b"3"))


def test_the_first_of_its_kind_is_no_repetition() -> None:
    repeats = Repeats(memory_s=10.0)
    assert repeats.note(ONE, 5.0) == 0.0
    assert repeats.note(ONE, 5.0) == pytest.approx(0.1)
    assert repeats.note(OTHER, 5.0) == 0.0


def test_what_came_before_fades() -> None:
    repeats = Repeats(memory_s=10.0)
    repeats.note(ONE, 0.0)
    assert repeats.note(ONE, 10.0) == pytest.approx(0.1 * math.exp(-1))
    assert repeats.note(ONE, 1000.0) == pytest.approx(0.0, abs=1e-12)


def test_a_steady_rate_is_found() -> None:
    repeats, dice, now, found = Repeats(memory_s=10.0), random.Random(1), 0.0, list[float]()
    for _ in range(4000):
        now += dice.expovariate(27.0)
        found.append(repeats.note(ONE, now))
    later = found[1000:]
    # Of a count of 270 the deviation is the square root of its half.
    assert sum(later) / len(later) == pytest.approx(27.0, rel=0.05)
    assert max(later) < 27.0 * 1.3
    assert min(later) > 27.0 * 0.7


def test_what_less_than_half_begin_with_is_not_hot() -> None:
    repeats = Repeats(memory_s=10.0)
    for _ in range(10):
        repeats.note(ONE, 0.0)
    for _ in range(9):
        repeats.note(None, 0.0)
    assert repeats.note(ONE, 0.0) == pytest.approx(1.0)
    repeats.note(None, 0.0)
    repeats.note(OTHER, 0.0)
    assert repeats.note(ONE, 0.0) == 0.0
    # None is no beginning that anything could have in common.
    assert repeats.note(None, 0.0) == 0.0


def test_what_was_asked_for_least_lately_is_forgotten() -> None:
    repeats = Repeats(memory_s=10.0, most=2)
    for beginning in (ONE, OTHER, ONE, THIRD):
        repeats.note(beginning, 0.0)
    assert len(repeats) == 2
    for _ in range(3):
        repeats.note(ONE, 0.0)
    assert repeats.note(ONE, 0.0) == pytest.approx(0.5)
    for _ in range(20):
        repeats.note(OTHER, 0.0)
    assert repeats.note(OTHER, 0.0) == pytest.approx(2.0)


def test_each_model_has_its_own_and_the_one_that_was_asked_for_longest_ago_is_forgotten() -> None:
    models = ModelRepeats(models=2)
    for _ in range(9):
        models.of("busy").note(None, 0.0)
    models.of("quiet").note(ONE, 0.0)
    assert models.of("quiet").note(ONE, 0.0) == pytest.approx(0.1)
    assert models.of("busy").note(ONE, 0.0) == models.of("busy").note(ONE, 0.0) == 0.0
    models.of("third")
    assert len(models) == 2
    assert models.of("quiet").note(ONE, 0.0) == 0.0


def test_prompts_of_which_nobody_has_anything_count_for_their_model_too() -> None:
    models = ModelRepeats()
    models.of("m").note(None, 0.0)
    models.of("m").note(ONE, 0.0)
    assert models.of("m").note(ONE, 0.0) == 0.0  # one of two is not most
