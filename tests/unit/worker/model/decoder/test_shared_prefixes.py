"""Sequences that begin with the same blocks are attended to together: with the bits that each has alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.unit.worker.kernels.native import NATIVE, TEAMS
from tests.unit.worker.model import tiny
from tests.unit.worker.model.decoder.test_runner import KINDS, each_case, fresh, load, shuffled

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.worker.model.tiny import Text
    from worker.model.decoder.runner import DecoderRunner

pytestmark = pytest.mark.skipif(not NATIVE, reason="no compiler was found when the package was installed")

PREFIX = tiny.tokens(144, seed=99)
SHARED = (64, 144, 0, 128, 144, 144, 48, 128, 144, 144, 144, 64, 144, 112)
"""How much of the prefix each sequence has: runs of 64 keys that are whole, and ones that are not; none; and more
sequences with the same than are taken together."""


def sharing(made: DecoderRunner, free: list[int], *, seen: int) -> list[Text]:
    """Sequences on the blocks of one prefix, and ``seen`` tokens of their own beyond it, the first has most."""
    prefix = fresh(made, PREFIX, free)
    tiny.feed(made, prefix, len(PREFIX))
    texts = []
    for index, length in enumerate(SHARED):
        ids = PREFIX[:length] + tiny.tokens(50 - index, seed=index)
        text = fresh(made, ids, free)
        text.table[: length // made.block_size] = prefix.table[: length // made.block_size]
        text.done = length
        texts.append(text)
        tiny.step(made, (text, seen))
    return texts


@each_case
def test_each_has_the_bits_it_has_alone(saved: Callable[[str], Path], name: str, kind: str, level: str) -> None:
    made = load(saved(name), TEAMS[level], KINDS[kind])
    free = shuffled(made)
    texts = sharing(made, free, seen=17)
    alone = [made.forward([fresh(made, text.ids, free).next(len(text.ids), len(text.ids))]).clone() for text in texts]
    late = fresh(made, tiny.tokens(100, seed=77), free)
    for count in range(12):
        order = texts[count:] + texts[:count]
        tiny.step(made, *((text, 1) for text in order[:6]), (late, 8), *((text, 1) for text in order[6:]))
    for text, solo in zip(texts, alone, strict=True):
        assert len(text.logits) == 13
        for length, logits in text.logits.items():
            assert torch.equal(logits, solo[length - 1]), (length, len(text.ids))


@pytest.mark.parametrize("level", NATIVE)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_in_its_sequence(saved: Callable[[str], Path], kind: str, level: str) -> None:
    """Behind what is shared; also where it was written before this step."""
    made = load(saved("gemma2"), TEAMS[level], KINDS[kind])
    texts = sharing(made, shuffled(made), seen=20)
    rows = [text.next(1) for text in texts]
    expected = made.forward(rows).clone()
    for broken in (1, 4, 8):
        own = texts[broken].table[SHARED[broken] // made.block_size]
        kept = made.model.pages[:, own].clone()
        tiny.poison_blocks(made, [own])
        got = made.forward(rows)
        others = [index for index in range(len(texts)) if index != broken]
        assert got[broken].isnan().all()
        assert torch.equal(got[others], expected[others])
        made.model.pages[:, own] = kept
    assert torch.equal(made.forward(rows), expected)


@pytest.mark.skipif(not NATIVE, reason="no compiler was found when the package was installed")
def test_as_many_are_read_for_together_as_fill_a_tile(saved: Callable[[str], Path]) -> None:
    """Six heads, two of keys and values: three queries of each sequence, five sequences in a tile of sixteen."""
    made = load(saved("llama"), next(iter(NATIVE.values())))
    free = shuffled(made)
    prefix = fresh(made, PREFIX, free)
    tiny.feed(made, prefix, len(PREFIX))
    assert made.readings == [7]  # of 144 rows, 21 at a time
    texts = [fresh(made, [*PREFIX, 5, index], free) for index in range(11)]
    for text in texts:
        text.table[:9], text.done = prefix.table, len(PREFIX)
    loner = fresh(made, tiny.tokens(40), free)
    loner.done = 39
    rows = [text.next(1) for text in texts]
    for some, readings in ((rows[:1], 1), (rows[:5], 1), (rows[:6], 2), (rows, 3), ([*rows, loner.next(1)], 4)):
        made.forward(some)
        assert made.readings == [readings]
    for text in texts:
        text.table[3] = free.pop()  # less than a chunk is the same
    made.forward(rows)
    assert made.readings == [11]
