from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch

from tests.unit.worker.kernels.book import Book, oracle
from worker.kernels import attention, cores, methods
from worker.kernels.cores import LayerSpec, fused, reference

if TYPE_CHECKING:
    from worker.kernels.plan import TileBatch

DTYPES = (torch.float32, torch.bfloat16)
ERROR = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def spec(kv_heads: int = 2, group: int = 3, head_size: int = 32, window: int = 0, softcap: float = 0.0) -> LayerSpec:
    return LayerSpec(kv_heads * group, kv_heads, head_size, head_size**-0.5, window, softcap)


@pytest.mark.parametrize("seed", range(12))
def test_any_shape_in_any_pieces_is_what_float64_says(seed: int) -> None:
    chance = random.Random(seed)
    layer = spec(
        kv_heads=chance.choice([1, 2, 3]),
        group=chance.choice([1, 2, 3, 7]),
        head_size=chance.choice([16, 24, 64, 80]),
        window=chance.choice([0, 0, 1, 5, 33, 150]),
        softcap=chance.choice([0.0, 0.0, 3.0]),
    )
    dtype = chance.choice(DTYPES)
    book = Book(layer, dtype, block_size=chance.choice([1, 4, 16, 128]), num_blocks=1200, seed=seed)
    texts = [book.text(chance.choice([1, 2, 31, 129, 200])) for _ in range(4)]
    book.run(texts, pieces=[1, 1, 2, 15, 16, 17, 90])
    for text in texts:
        expected = oracle(layer, text)
        error = (text.result().double() - expected).norm() / expected.norm()
        assert error < ERROR[dtype], (layer, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("window", [0, 50])
def test_bits_do_not_depend_on_company_pieces_or_blocks(dtype: torch.dtype, softcap: float, window: int) -> None:
    # With this, any three of the four come in all their combinations.
    group = 1 if (dtype is torch.float32) ^ (softcap > 0) ^ (window > 0) else 3
    book = Book(spec(group=group, window=window, softcap=softcap), dtype, block_size=16, num_blocks=600, seed=group)
    whole = book.text(530)
    book.step([(whole, 530)])
    alone, mixed = book.again(whole), book.again(whole)
    book.run([alone], pieces=[1, 1, 1, 40])
    book.run([mixed, *(book.text(length) for length in (3, 64, 300, 700))], pieces=[1, 2, 31, 100])
    assert torch.equal(alone.result(), whole.result())
    assert torch.equal(mixed.result(), whole.result())


def test_a_batch_larger_than_the_space_for_it_runs_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    book = Book(spec(), torch.float32, block_size=16, num_blocks=200, seed=0)
    texts = [book.text(200) for _ in range(5)]
    book.step([(text, 200) for text in texts])
    copies = [book.again(text) for text in texts]
    monkeypatch.setattr(attention, "WORKSPACE_BYTES", 1)
    book.step([(text, 200) for text in copies])
    for text, copy in zip(texts, copies, strict=True):
        assert torch.equal(copy.result(), text.result())


@pytest.mark.parametrize("core", [reference, fused])
def test_a_block_begun_again_shows_nothing_of_what_it_held(core: cores.Core, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = spec()
    book = Book(layer, torch.float32, block_size=16, num_blocks=4, seed=0)
    method = book.attention.methods[0]
    monkeypatch.setattr(book.attention, "methods", (methods.Method(core, "", method.heads),))
    broken = book.text(16)
    broken.key[3:] = torch.nan
    book.free[:0] = broken.table
    book.attention.pages[0][broken.table] = torch.nan
    for _ in range(4):
        text = book.text(5)
        book.run([text], pieces=[2])
        assert (text.result().double() - oracle(layer, text)).abs().max() < 1e-5
        assert torch.equal(book.attention.pages[0][text.table[0], :, 5:], torch.zeros(4, 11, 32))
        book.free.append(text.table[0])
        book.attention.pages[0][text.table] = torch.nan


def test_the_reference_ignores_what_no_row_may_see() -> None:
    book = Book(spec(window=20), torch.float32, block_size=16, num_blocks=40, seed=0)
    text = book.text(100)
    batches = []

    def keep(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: TileBatch, *scale: float):
        key, value = key.clone(), value.clone()
        hidden = ~batch.visible.any(dim=-2).unsqueeze(-1)
        batches.append(int(hidden.sum()))
        poisoned = [given.masked_fill(hidden, torch.nan) for given in (key, value)]
        return reference(query, *poisoned, batch, *scale)

    book.attention.methods = (methods.Method(keep, "poisoned", book.attention.methods[0].heads),)
    book.step([(text, 100)])
    assert all(batches)
    assert (text.result().double() - oracle(spec(window=20), text)).abs().max() < 1e-5


def test_only_powers_of_two_are_block_sizes() -> None:
    with pytest.raises(ValueError, match="block size 12 is not a power of two"):
        Book(spec(), torch.float32, block_size=12, num_blocks=4, seed=0)


def test_layers_of_several_shapes_share_a_pool() -> None:
    layers = [spec(), spec(kv_heads=1), spec(), spec(head_size=16)]
    pool = attention.PoolShape(num_blocks=3, block_size=8)
    pages = attention.PagedAttention(layers, pool, torch.float32, torch.device("cpu")).pages
    assert [tuple(page.shape) for page in pages] == [(5, 4, 8, 32), (5, 2, 8, 32), (5, 4, 8, 32), (5, 4, 8, 16)]
    assert len({page.data_ptr() for page in pages}) == 4
