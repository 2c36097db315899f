"""Prompts: of the lengths asked for, and the same for the same seed."""

from __future__ import annotations

import pytest

from bench.workload import Lengths, Workload

WORKLOAD = Workload(Lengths(20, 90), Lengths(4, 8), shared_prefix=16, cache_salt="s")


def ids(workload: Workload, count: int = 50, stream: int = 0) -> list[list[int]]:
    return [list(request.token_ids.ids) for request in workload.requests(count, 1000, stream)]


@pytest.mark.parametrize(("text", "lengths"), [("7", Lengths(7, 7)), ("3:9", Lengths(3, 9))])
def test_lengths_are_parsed_and_shown(text: str, lengths: Lengths) -> None:
    assert Lengths.parse(text) == lengths
    assert str(lengths) == text


@pytest.mark.parametrize("text", ["", "0", "-1", "9:3", "0:5", "1:2:3", "x", "1.5"])
def test_lengths_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"neither a number|no range"):
        Lengths.parse(text)


def test_lengths_and_ids_are_in_range() -> None:
    prompts = ids(WORKLOAD, 1000)
    assert {len(prompt) for prompt in prompts} == set(range(20, 91))
    assert all(256 <= token < 1000 for prompt in prompts for token in prompt)
    requests = WORKLOAD.requests(200, 1000, 0)
    assert {request.stopping.max_tokens for request in requests} == set(range(4, 9))
    assert all(request.stopping.ignore_eos and request.cache_salt == "s" for request in requests)
    assert all(request.sampling.HasField("temperature") for request in requests)


def test_the_same_seed_sends_the_same_and_streams_differ() -> None:
    assert ids(WORKLOAD) == ids(WORKLOAD)
    assert not {tuple(p) for p in ids(WORKLOAD, stream=0)} & {tuple(p) for p in ids(WORKLOAD, stream=-1)}


def test_the_prefix_is_shared_and_no_more() -> None:
    prompts = ids(WORKLOAD) + ids(WORKLOAD, stream=1)
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 1
    assert len({tuple(prompt[:20]) for prompt in prompts}) == len(prompts)


def test_a_prompt_is_longer_than_what_it_shares() -> None:
    short = Workload(Lengths(2, 2), Lengths(1, 1), shared_prefix=8)
    assert {len(prompt) for prompt in ids(short)} == {9}


def test_text_prompts_have_about_the_words_for_their_tokens() -> None:
    workload = Workload(Lengths(40, 40), Lengths(1, 1), kind="text")
    texts = [request.text for request in workload.requests(20, 1000, 0)]
    assert {len(text.split()) for text in texts} == {30}
    assert len(set(texts)) > 10


def test_a_tiny_vocabulary_is_enough() -> None:
    tokens = {t for request in WORKLOAD.requests(50, 32, 0) for t in request.token_ids.ids}
    assert tokens == set(range(16, 32))
