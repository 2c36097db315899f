"""Groups of prompts and their arrivals: the same for the same seed, and shared as far as they should be."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest

from bench.routing_load import (
    GROUPS,
    HIT_FREE,
    HOT,
    MOST_HIT_FREE_LOAD,
    GroupedLoad,
    Scenario,
    arrivals,
    scenarios,
)
from bench.workload import FIRST_ID, Lengths

VOCABULARY = 1000
LOAD = GroupedLoad(prefix_tokens=40, tail_tokens=Lengths(3, 9), output_tokens=Lengths(2, 5), seed=7)
THREE = Scenario(GROUPS, groups=3, ratio=0.5, load=1.0)


def test_a_prompt_is_its_groups_prefix_and_a_tail_of_its_own() -> None:
    asks = LOAD.asks(THREE, rate=50, seconds=4, vocab_size=VOCABULARY)
    prefixes = {ask.group: ask.prompt[:40] for ask in asks}
    assert sorted(prefixes) == [0, 1, 2]
    assert len(set(prefixes.values())) == 3
    assert all(ask.prompt[:40] == prefixes[ask.group] for ask in asks)
    assert len({ask.prompt[40:] for ask in asks}) == len(asks)
    assert {len(ask.prompt) - 40 for ask in asks} == set(range(3, 10))
    assert {ask.output_tokens for ask in asks} == {2, 3, 4, 5}
    assert all(FIRST_ID <= token < VOCABULARY for ask in asks for token in ask.prompt)


def test_the_same_seed_asks_the_same_and_another_one_does_not() -> None:
    first, again = (LOAD.asks(THREE, 20, 3, VOCABULARY) for _ in range(2))
    assert first == again
    other = GroupedLoad(40, Lengths(3, 9), Lengths(2, 5), seed=8).asks(THREE, 20, 3, VOCABULARY)
    assert not {ask.prompt for ask in first} & {ask.prompt for ask in other}
    assert [ask.due_s for ask in first] != [ask.due_s for ask in other]


def test_arrivals_are_those_of_other_scenarios_of_the_same_rate() -> None:
    free = Scenario(HIT_FREE, groups=0, ratio=0.0, load=1.0)
    assert [a.due_s for a in LOAD.asks(free, 20, 3, VOCABULARY)] == [
        a.due_s for a in LOAD.asks(THREE, 20, 3, VOCABULARY)
    ]


def test_hit_free_prompts_have_nothing_in_common() -> None:
    asks = LOAD.asks(Scenario(HIT_FREE, groups=0, ratio=0.0, load=1.0), 50, 4, VOCABULARY)
    assert {ask.group for ask in asks} == {-1}
    assert len({ask.prompt[:16] for ask in asks}) == len(asks)
    strangers = [*islice(LOAD.endless(0, VOCABULARY), 50)]
    assert len({ask.prompt[:16] for ask in (*asks, *strangers)}) == len(asks) + 50
    assert all(43 <= len(ask.prompt) <= 49 and ask.due_s == 0 for ask in strangers)


def test_caches_are_filled_with_the_groups_of_a_run_and_with_none_of_its_prompts() -> None:
    asks = LOAD.asks(THREE, 50, 4, VOCABULARY)
    before = [*islice(LOAD.endless(3, VOCABULARY), 99)]
    assert all({ask.group for ask in before[turn : turn + 3]} == {0, 1, 2} for turn in range(0, 99, 3))
    assert {ask.prompt[:40] for ask in before} == {ask.prompt[:40] for ask in asks}
    assert not {ask.prompt for ask in before} & {ask.prompt for ask in asks}
    assert before == [*islice(LOAD.endless(3, VOCABULARY), 99)]


def test_arrivals_are_poisson() -> None:
    moments = arrivals(rate=100, seconds=100, seed=1)
    assert moments == sorted(moments)
    assert moments[-1] < 100
    # Ten standard deviations of the count; gaps of an exponential distribution deviate by their mean.
    assert 9000 < len(moments) < 11000
    gaps = [after - before for before, after in pairwise(moments)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert 0.9 < deviation / mean < 1.1
    with pytest.raises(ValueError, match="0 arrivals"):
        arrivals(rate=0, seconds=1, seed=1)


def test_a_request_is_greedy_and_of_a_known_length() -> None:
    ask = LOAD.asks(THREE, 20, 3, VOCABULARY)[0]
    request = ask.request("salt")
    assert tuple(request.token_ids.ids) == ask.prompt
    assert (request.stopping.max_tokens, request.stopping.ignore_eos) == (ask.output_tokens, True)
    assert (request.sampling.temperature, request.cache_salt) == (0.0, "salt")


def test_scenarios_of_a_sweep() -> None:
    found = scenarios((0.5, 2.0), (0.4, 3.0), pool_tokens=4096, prefix_tokens=512, hot=True, hit_free=True)
    assert [(each.name, each.groups, each.load) for each in found] == [
        ("ratio 0.5", 4, 0.4),
        ("ratio 0.5", 4, 3.0),
        ("ratio 2", 16, 0.4),
        ("ratio 2", 16, 3.0),
        (HOT, 1, 0.4),
        (HOT, 1, 3.0),
        (HIT_FREE, 0, 0.4),
        (HIT_FREE, 0, MOST_HIT_FREE_LOAD),
    ]
    small = scenarios((0.01,), (5.0, 6.0), pool_tokens=4096, prefix_tokens=512, hot=False, hit_free=True)
    assert [(each.kind, each.groups, each.load) for each in small] == [
        (GROUPS, 1, 5.0),
        (GROUPS, 1, 6.0),
        (HIT_FREE, 0, MOST_HIT_FREE_LOAD),
    ]
