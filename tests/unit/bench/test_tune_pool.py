"""Tables as pools give them out, fresh, worn and in pieces."""

from __future__ import annotations

import pytest

from bench.tune_pool import FRESH, PIECES, WORN, neighbours, tables, wear
from worker.scheduling.block_pool import BlockPool


def of(state: str, block_run: int = 1, **sizes: int) -> list[list[int]]:
    given = {"num_blocks": 64, "block_size": 16, "sequences": 2, "context": 8 * 16, **sizes}
    return tables(state, block_run=block_run, seed=0, **given)


def test_in_a_fresh_pool_prompts_lie_together_and_answers_lie_in_turn() -> None:
    assert of(FRESH) == [[0, 1, 2, 3, 8, 10, 12, 14], [4, 5, 6, 7, 9, 11, 13, 15]]


def test_with_runs_answers_lie_together_too() -> None:
    assert of(FRESH, 16) == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 13, 14, 15, 16]]


def test_pieces_are_in_no_order_and_nobody_elses() -> None:
    made = of(PIECES, num_blocks=1000, context=400 * 16)
    assert len({block for table in made for block in table}) == 800
    assert neighbours(made)[0] < 10
    assert made == of(PIECES, num_blocks=1000, context=400 * 16)


@pytest.mark.parametrize("block_run", [1, 16])
@pytest.mark.parametrize(("num_blocks", "block_size"), [(2048, 16), (256, 128), (2, 16)])
def test_a_worn_pool_is_full_of_what_nobody_uses(num_blocks: int, block_size: int, block_run: int) -> None:
    pool = BlockPool(num_blocks, block_size, block_run=block_run)
    wear(pool, 0)
    pool.check_integrity([])
    assert pool.available == num_blocks
    if num_blocks > 2:
        assert pool.evictions > num_blocks / 3
        assert pool.cached_count > num_blocks * 0.7


def test_a_context_may_need_all_of_a_worn_pool_but_no_more() -> None:
    (table,) = of(WORN, sequences=1, context=64 * 16)
    assert sorted(table) == [*range(64)]
    with pytest.raises(ValueError, match="a pool of 64 blocks is too small"):
        of(WORN, sequences=1, context=64 * 16 + 1)


def test_neighbours_are_counted_where_there_may_be_any() -> None:
    assert neighbours([[3, 4, 6, 7, 8], [2], [1, 0]]) == (3, 5)
