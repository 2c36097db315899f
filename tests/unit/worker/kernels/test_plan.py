from __future__ import annotations

import pytest
import torch

from worker.kernels.plan import Heads, PoolShape, StepPlan
from worker.step import StepRow

POOL = PoolShape(num_blocks=100, block_size=16)
CPU = torch.device("cpu")
HEADS = Heads(kv_heads=1, group=1, window=0, wide=32, narrow=1)


def plan(*rows: StepRow, max_keys: int = 1 << 20) -> StepPlan:
    return StepPlan(rows, POOL, torch.float32, CPU, max_keys)


def row(start: int, count: int, table: list[int] | None = None, logits: int = 1) -> StepRow:
    needed = -(-(start + count) // POOL.block_size)
    return StepRow(list(range(start, start + count)), start, table or list(range(needed)), logits)


def shape_of(step: StepPlan, token: int, heads: Heads) -> tuple[int, int]:
    """Padded keys of the tile that computes a token of the only head, and how far back the last one is."""
    layer = step.layer(heads)
    place = int(layer.result_rows[token])
    for batch in layer.batches:
        if place < batch.tiles * batch.width:
            visible = batch.visible[place // batch.width, 0, place % batch.width]
            return batch.keys, int(step.positions[0, token]) - int(visible.nonzero().max())
        place -= batch.tiles * batch.width
    raise AssertionError("no batch computes it")


def test_tokens_lie_side_by_side_and_padding_goes_to_the_trash() -> None:
    step = plan(row(0, 3, [7]), row(30, 4, [4, 9, 2]))
    assert (step.tokens, step.real_tokens) == (16, 7)
    assert step.token_ids[0, :8].tolist() == [0, 1, 2, 30, 31, 32, 33, 0]
    assert step.positions[0, :8].tolist() == [0, 1, 2, 30, 31, 32, 33, 0]
    slots = [7 * 32, 7 * 32 + 1, 7 * 32 + 2, 9 * 32 + 14, 9 * 32 + 15, 2 * 32, 2 * 32 + 1]
    assert step.layer(HEADS).key_rows.tolist() == slots + [POOL.trash * 32] * 9
    assert (step.layer(HEADS).value_rows - step.layer(HEADS).key_rows).tolist() == [16] * 16


def test_logits_are_those_of_the_last_tokens_of_rows_that_ask() -> None:
    step = plan(row(0, 3), row(5, 1, logits=0), row(9, 2))
    assert step.logit_count == 2
    assert step.logit_rows.tolist() == [2, 5] + [0] * 14
    assert len(plan(row(0, 3, logits=0)).logit_rows) == 0
    several = plan(row(0, 3, logits=2), row(5, 1), row(9, 4, logits=4))
    assert several.logit_count == 7
    assert several.logit_rows.tolist()[:7] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("rows", "fresh"),
    [
        ([row(0, 16)], None),
        ([row(0, 17, [5, 6])], [6]),
        ([row(15, 1)], None),
        ([row(16, 1, [5, 6])], [6]),
        ([row(17, 3)], None),
        ([row(3, 40, [5, 6, 7]), row(0, 1, [9]), row(20, 1)], [7, 9]),
    ],
)
def test_blocks_begun_and_not_filled_are_fresh(rows: list[StepRow], fresh: list[int] | None) -> None:
    found = plan(*rows).fresh_blocks
    assert (None if found is None else found.tolist()) == fresh


@pytest.mark.parametrize("window", [0, 40, 200])
def test_the_keys_of_a_token_follow_from_its_position_alone(window: int) -> None:
    heads = HEADS._replace(window=window)
    whole = plan(row(0, 600))
    expected = {position: shape_of(whole, position, heads) for position in (0, 31, 32, 127, 128, 300, 511, 599)}
    for position, shape in expected.items():
        for start, count in ((position, 1), (max(0, position - 5), 7), (max(0, position - 200), 300)):
            step = plan(row(7, 3), row(start, count))
            assert shape_of(step, 3 + position - start, heads) == shape
    assert expected[0] == (128, 0)
    assert expected[300] == {0: (384, 0), 40: (256, 128), 200: (384, 0)}[window]


def test_decoding_sequences_of_like_length_run_as_one_batch() -> None:
    step = plan(*(row(length, 1) for length in (5, 100, 127, 300, 310)))
    assert [(batch.tiles, batch.width, batch.keys) for batch in step.layer(HEADS).batches] == [(3, 1, 128), (2, 1, 384)]


def test_batches_stay_within_the_space_for_keys() -> None:
    step = plan(*(row(100, 1) for _ in range(5)), max_keys=300)
    assert [batch.tiles for batch in step.layer(HEADS).batches] == [2, 2, 1]
    assert [batch.tiles for batch in plan(row(700, 1), max_keys=1).layer(HEADS).batches] == [1]


def test_blocks_past_the_last_query_stand_for_zeros() -> None:
    step = plan(row(0, 40, [3, 1, 8]))
    pages = [batch.pages.view(2, batch.tiles, 8)[0] // 2 for batch in step.layer(HEADS).batches]
    zeros = POOL.zeros
    assert pages[0].tolist() == [[3, 1, *[zeros] * 6], [3, 1, 8, *[zeros] * 5]]


def test_a_table_too_short_for_its_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        plan(row(0, 40, [3, 1]))
