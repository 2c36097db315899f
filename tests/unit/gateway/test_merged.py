"""Several calls for one job, read as one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.merged import BrokenStream, Merged
from octavo.v1.inference_pb2 import (
    CANCELLED,
    ERROR,
    LENGTH,
    STOP,
    Chunk,
    FinishReason,
    GenerateResponse,
    TokenLogprobs,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Text = list[str]
"""What each token of a choice brings of its text."""


def whole(choice: int, text: Text) -> list[Chunk]:
    """All chunks of a choice: each one token, with its text and log-probability."""
    return [
        Chunk(
            choice=choice,
            start=index,
            token_ids=[100 * choice + index],
            text=piece,
            finish=STOP if index == len(text) - 1 else None,
            logprobs=[TokenLogprobs(token_id=index)],
            prompt_logprobs=[TokenLogprobs(token_id=9)] if choice == index == 0 else [],
        )
        for index, piece in enumerate(text)
    ]


def in_some_order(chunks: Sequence[list[Chunk]], draw: Callable[[st.SearchStrategy[int]], int]) -> list[Chunk]:
    """Of all choices, each in its own order."""
    queues = [list(each) for each in chunks if each]
    mixed = []
    while queues:
        at = draw(st.integers(0, len(queues) - 1))
        mixed.append(queues[at].pop(0))
        if not queues[at]:
            del queues[at]
    return mixed


@given(st.data())
def test_whatever_is_cut_where_each_token_comes_once(data: st.DataObject) -> None:
    texts = data.draw(
        st.lists(st.lists(st.sampled_from(["", "a", "bc"]), min_size=1, max_size=6), min_size=1, max_size=3)
    )
    answer = [whole(choice, text) for choice, text in enumerate(texts)]
    merged = Merged(len(answer))
    come: list[Chunk] = []
    for last in (*data.draw(st.lists(st.just(False), max_size=4)), True):
        replay = not come or data.draw(st.booleans())
        merged.begin(replay=replay)
        # A choice of which the caller has all is told to have ended, by a chunk without tokens.
        rest = [
            each if replay else each[merged.have[choice] :] or [Chunk(choice=choice, start=len(each), finish=STOP)]
            for choice, each in enumerate(answer)
        ]
        call = in_some_order(rest, data.draw)
        for chunk in call if last else call[: data.draw(st.integers(0, len(call)))]:
            news = merged.take(GenerateResponse(chunks=[chunk]))
            come += news.chunks if news is not None else []
    merged.check_end()
    assert merged.over
    for choice, each in enumerate(answer):
        assert [chunk for chunk in come if chunk.choice == choice] == each


def test_a_chunk_of_which_a_part_has_come_is_cut() -> None:
    merged = Merged(1)
    assert merged.take(GenerateResponse(chunks=[Chunk(token_ids=[1, 2], text="ab")])) is not None
    merged.begin(replay=True)
    logprobs = [TokenLogprobs(token_id=index) for index in (1, 2, 3)]
    again = Chunk(token_ids=[1, 2, 3], text="abc", logprobs=logprobs, prompt_logprobs=logprobs)
    news = merged.take(GenerateResponse(request_id="r", chunks=[again]))
    assert news == GenerateResponse(
        request_id="r", chunks=[Chunk(start=2, token_ids=[3], text="c", logprobs=logprobs[2:])]
    )


def test_route_and_usage_come_once_and_nothing_comes_of_nothing() -> None:
    merged = Merged(1)
    first = GenerateResponse(request_id="r", route={"worker": "w0"}, usage={"attempts": 1})
    assert merged.take(first) == first
    assert merged.take(GenerateResponse(request_id="r", route={"worker": "w1"}, usage={"attempts": 2})) is None
    assert merged.take(GenerateResponse(request_id="r")) is None


@pytest.mark.parametrize("finish", [CANCELLED, ERROR])
def test_an_end_from_outside_may_come_before_what_the_caller_has(finish: FinishReason) -> None:
    """The job was ended before it had got there again. The end is behind all that came."""
    merged = Merged(1)
    merged.take(GenerateResponse(chunks=[Chunk(token_ids=[1, 2, 3])]))
    merged.begin(replay=True)
    assert merged.take(GenerateResponse(chunks=[Chunk(token_ids=[1])])) is None
    news = merged.take(GenerateResponse(chunks=[Chunk(start=1, finish=finish)]))
    assert news == GenerateResponse(chunks=[Chunk(start=3, finish=finish)])
    assert (merged.over, merged.failed) == (True, finish == ERROR)


@pytest.mark.parametrize("finish", [STOP, LENGTH])
def test_a_shorter_answer_is_another_answer(finish: FinishReason) -> None:
    merged = Merged(1)
    merged.take(GenerateResponse(chunks=[Chunk(token_ids=[1, 2, 3])]))
    merged.begin(replay=True)
    with pytest.raises(BrokenStream, match="choice 0 ends after 2 tokens, of which 3 had come"):
        merged.take(GenerateResponse(chunks=[Chunk(token_ids=[1, 2], finish=finish)]))


@pytest.mark.parametrize(("sizes", "index"), [((3,), 1), ((1, 1, 1), 1), ((1, 2), 2)])
def test_tokens_that_come_again_are_those_that_came(sizes: Sequence[int], index: int) -> None:
    """Else two answers would become one. Of each choice for itself, however its chunks are cut."""
    merged = Merged(2)
    merged.take(GenerateResponse(chunks=[Chunk(token_ids=[7, 8]), Chunk(choice=1, token_ids=[1, 2])]))
    merged.take(GenerateResponse(chunks=[Chunk(choice=1, start=2, token_ids=[3])]))
    merged.begin(replay=True)
    again = [1, 2, 3]
    again[index] = 2**32 - 1
    chunks, start = [Chunk(token_ids=[7, 8])], 0
    for size in sizes:
        chunks.append(Chunk(choice=1, start=start, token_ids=again[start : start + size]))
        start += size
    with pytest.raises(BrokenStream, match=f"choice 1: token {index} is 4294967295 and was {index + 1} before"):
        merged.take(GenerateResponse(chunks=chunks))
    assert merged.have == {0: 2, 1: 3}


def test_what_is_attached_to_begins_with_what_is_missing() -> None:
    merged = Merged(2)
    merged.take(GenerateResponse(chunks=[Chunk(token_ids=[1, 2])]))
    merged.begin(replay=False)
    with pytest.raises(BrokenStream, match="choice 0: a chunk starts at 1, expected 2"):
        merged.take(GenerateResponse(chunks=[Chunk(start=1, token_ids=[2])]))
    with pytest.raises(BrokenStream, match="without a terminal chunk of choice 0, 1"):
        merged.check_end()
