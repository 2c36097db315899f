"""What is not finite in one sequence: where it goes, and where it never gets to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from transformers import LlamaConfig

from tests.unit.worker.model import tiny
from tests.unit.worker.model.tiny import BLOCK, Text
from worker.model.hf import NotFinite
from worker.step import StepRow

if TYPE_CHECKING:
    from pathlib import Path

    from worker.model.hf import HfRunner

SICK = 77
"""The token whose embedding is not a number."""

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Widths that no register of a processor divides: some products read on into the next row there."""
    sizes = {**tiny._SIZES, "hidden_size": 90, "intermediate_size": 107, "head_dim": 24}
    return tiny.save(LlamaConfig(**sizes), tmp_path_factory.mktemp("odd"))


@pytest.fixture
def runner(directory: Path, dtype: torch.dtype) -> HfRunner:
    made = tiny.runner(directory, dtype)
    with torch.no_grad():
        made.model.get_input_embeddings().weight[SICK] = torch.nan
    return made


def healthy(count: int, seed: int) -> list[int]:
    return [token if token != SICK else 0 for token in tiny.tokens(count, seed)]


def sick(count: int, at: int) -> list[int]:
    ids = healthy(count, 99)
    ids[at] = SICK
    return ids


@DTYPES
def test_neighbours_keep_their_bits(runner: HfRunner) -> None:
    """Also in the tiles of rows that they share with it, on either side, in batches of every size of tile."""
    good = [Text(healthy(30, index), [2 * index, 2 * index + 1]) for index in range(60)]
    tiny.step(runner, *((text, 29) for text in good))
    expected = runner.forward([text.next(1) for text in good])
    for count in (2, 7, 20, 60):
        rows = [text.next(1) for text in good[:count]]
        rows.insert(count // 2, StepRow(sick(5, 4), 0, [150], 1))
        logits = runner.forward(rows)
        assert torch.isnan(logits[count // 2]).all()
        assert torch.equal(torch.cat([logits[: count // 2], logits[count // 2 + 1 :]]), expected[:count])


@DTYPES
@pytest.mark.parametrize("at", [0, 13, 31, 32, 49])
def test_a_chunk_that_asks_for_nothing_says_so(runner: HfRunner, at: int) -> None:
    row = StepRow(sick(50, at), 0, [0, 1, 2, 3], 0)
    fine = Text(healthy(20, 1), [5, 6])
    with pytest.raises(NotFinite, match="keys or values of a chunk are not finite"):
        runner.forward([fine.next(20), row])
    again = runner.forward([fine.next(20)])
    assert torch.isfinite(again).all()
    assert torch.equal(again, runner.forward([Text(fine.ids, [8, 9]).next(20)]))


@DTYPES
def test_all_the_logits_of_a_sick_row_are_nan(runner: HfRunner) -> None:
    """Those before the sick token too: pages that are not finite may be behind any of them."""
    fine, ids = healthy(20, 1), sick(40, 35)
    rows = [StepRow(fine, 0, [5, 6], 3), StepRow(ids, 0, [0, 1, 2], 10), StepRow(fine, 0, [7, 8], 3)]
    logits = runner.forward(rows)
    assert torch.isnan(logits[3:13]).all()
    assert torch.isfinite(logits[:3]).all()
    assert torch.equal(logits[:3], logits[13:])


@DTYPES
def test_what_a_step_before_left_in_pages_stays_sound(runner: HfRunner) -> None:
    """Blocks that were computed in earlier steps may have been offered to others: nothing reaches back to them."""
    text = Text(sick(48, 20), [4, 2, 9])
    tiny.step(runner, (text, BLOCK))
    before = [pages[4].clone() for pages in runner.attention.pages]
    tiny.step(runner, (text, 32))
    assert torch.isnan(text.logits[48]).all()
    for pages, kept in zip(runner.attention.pages, before, strict=True):
        assert torch.equal(pages[4], kept)
        assert torch.isfinite(kept).all()


@DTYPES
def test_blocks_that_were_sick_serve_again(runner: HfRunner) -> None:
    ids = healthy(45, 3)
    expected = tiny.feed(runner, Text(ids, [10, 11, 12])).logits[45]
    runner.forward([StepRow(sick(48, 1), 0, [0, 1, 2], 1)])
    for pieces in ((45,), (1, 1, 43), (16, 5)):
        assert torch.equal(tiny.feed(runner, Text(ids, [2, 0, 1]), *pieces).logits[45], expected)
