"""Keys and values in eight bits: what a page holds, how near that is, and what it takes.

That a token has the same bits on every path is tested with the other kinds of pages, see `test_runner.CASES`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoConfig

from tests.unit.worker.kernels.native import NATIVE
from tests.unit.worker.model import tiny
from tests.unit.worker.model.decoder import reference
from tests.unit.worker.model.decoder.test_runner import BEST, KINDS, SOME, distance, fresh, load, shuffled
from worker.model.decoder import runner as decoder
from worker.model.decoder.config import rotary_tables, shape_of
from worker.model.decoder.native import LANES, PACK, NativeModel
from worker.model.decoder.weights import read
from worker.step import NotFinite, StepRow

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.skipif(not NATIVE, reason="no compiler was found when the package was installed")

Halves = tuple[torch.Tensor, torch.Tensor]
"""Two of something: of keys and of values, or of both heads."""


def unpacked(made: decoder.DecoderRunner, layer: int, block: int) -> Halves:
    """The numbers of a block's keys and values as they are kept, ``[kv_heads, block_size, head]`` each."""
    heads, size, head = made.model.decoder.kv_heads, made.block_size, made.model.head
    pack, tiles = PACK[made.model.dtype], made.block_size // LANES
    pages = made.model.pages[layer, block].view(heads, -1)
    keys = pages[:, : size * head].view(heads, tiles, head // pack, LANES, pack)
    values = pages[:, size * head : 2 * size * head].view(heads, tiles, head // LANES, LANES // pack, LANES, pack)
    return (
        keys.permute(0, 1, 3, 2, 4).reshape(heads, size, head),
        values.permute(0, 1, 3, 5, 2, 4).reshape(heads, size, head),
    )


def scales(made: decoder.DecoderRunner, layer: int, block: int) -> Halves:
    """Float32 ``[kv_heads, block_size]`` each."""
    heads, size = made.model.decoder.kv_heads, made.block_size
    tail = made.model.pages[layer, block].view(heads, -1)[:, 2 * size * made.model.head :].contiguous()
    keys, values = tail.view(torch.float32).view(heads, 2, size).unbind(1)
    return keys, values


def in_steps(numbers: torch.Tensor, most: int = 127) -> torch.Tensor:
    """Rounded to multiples of a step, of which the largest of the last dimension has ``most``."""
    steps = numbers.abs().amax(dim=-1, keepdim=True) / most
    return (numbers / steps).round() * steps


def constant(
    saved: Callable[[str], Path], level: str, dtype: torch.dtype, key: Halves, value: Halves
) -> decoder.DecoderRunner:
    """A model of one layer whose two heads have these keys, before they are rotated, and values, whatever the token."""
    directory = saved("qwen2")
    config = AutoConfig.from_pretrained(directory)
    shape = shape_of(config, dtype)
    weights = read(directory, shape, dtype)
    shape = replace(shape, layers=shape.layers[:1])
    bias = torch.cat([torch.zeros(shape.heads * shape.head_dim), *key, *value])
    layer = replace(weights.layers[0], qkv=torch.zeros_like(weights.layers[0].qkv), qkv_bias=bias)
    model = NativeModel(
        shape,
        replace(weights, layers=(layer,)),
        rotary_tables(config, shape, 64),
        num_blocks=4,
        block_size=32,
        eight_bit_pages=True,
    )
    made = decoder.DecoderRunner(NATIVE[level], model, vocab_size=shape.vocab, block_size=32, context_length=64)
    tiny.poison(made)
    return made


def numbers(*first: float) -> torch.Tensor:
    return torch.tensor([*first, *[0.0] * (16 - len(first))])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("level", NATIVE)
def test_known_numbers_become_known_steps(saved: Callable[[str], Path], level: str, dtype: torch.dtype) -> None:
    """To the nearest, ties to even; nothing becomes nothing; the largest numbers there are stay finite."""
    key = (numbers(-254, 1, 3, 5, -1, -3, 252.9, 253.1), numbers(3e38, -3e38, 1))
    value = (numbers(0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 127, -127, 63.49, 63.51), numbers())
    made = constant(saved, level, dtype, key, value)
    made.forward([StepRow([5] * 19, 0, [2], 0)])
    keys, values = unpacked(made, 0, 2)
    assert keys[0, 0].tolist() == [-127, 0, 2, 2, 0, -2, 126, 127, *[0] * 24]
    assert keys[1, 0].tolist() == [127, -127, *[0] * 30]
    for position in range(19):
        assert values[0, position].tolist() == [0, 2, 2, 0, -2, -2, 127, -127, 63, 64, *[0] * 22]
        assert values[1, position].tolist() == [0] * 32
    of_keys, of_values = scales(made, 0, 2)
    assert of_keys[:, 0].tolist() == [2, float(torch.tensor(3e38) / 127)]
    # What is not written yet has scales of 0.
    assert of_values.tolist() == [[1] * 19 + [0] * 13, [0] * 32]
    assert not of_keys[:, 19:].any()


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("level", NATIVE)
def test_what_is_not_finite_has_no_scale(saved: Callable[[str], Path], level: str, broken: float) -> None:
    made = constant(saved, level, torch.float32, (numbers(1), numbers(broken, 1)), (numbers(2, broken), numbers(3)))
    with pytest.raises(NotFinite):
        made.forward([StepRow([5], 0, [2], 0)])
    for whole, scale, head in zip(unpacked(made, 0, 2), scales(made, 0, 2), (1, 0), strict=True):
        assert scale[:, 0].isnan().tolist() == [head == 0, head == 1]
        assert not whole[head, 0].any()


@pytest.mark.parametrize("level", NATIVE)
@pytest.mark.parametrize("name", ["qwen3", "odd"])
def test_pages_hold_what_other_pages_hold_in_steps(saved: Callable[[str], Path], name: str, level: str) -> None:
    """Of the first layer, which comes from the same numbers in both."""
    ids = tiny.tokens(64 + 11)
    wide, small = (load(saved(name), NATIVE[level], KINDS[kind]) for kind in ("float32", "float32, kv int8"))
    table = [9, 3, 7, 4, 1]
    for made in (wide, small):
        made.forward([StepRow(ids, 0, table, 1)])
    for index, block in enumerate(table):
        written = min(16, len(ids) - 16 * index)
        halves = unpacked(wide, 0, block), unpacked(small, 0, block), scales(small, 0, block)
        for exact, whole, scale in zip(*halves, strict=True):
            expected = exact[:, :written].abs().amax(dim=-1) / 127
            assert torch.equal(scale[:, :written], expected)
            assert torch.equal(whole[:, :written].float(), (exact[:, :written] / expected[..., None]).round())
            assert not scale[:, written:].any()


@pytest.mark.parametrize("level", NATIVE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SOME)
def test_logits_are_as_near_as_eight_bits_can_be(
    saved: Callable[[str], Path], name: str, dtype: str, level: str
) -> None:
    """In float32 nothing is lost but what rounding keys and values costs; in bfloat16 less than in a model whose every
    operation rounds to it. Both are far nearer than with half as many steps, and within 2.5 percent."""
    directory, ids = saved(name), tiny.tokens(150)
    made = load(directory, NATIVE[level], KINDS[f"{dtype}, kv int8"])
    got = made.forward([fresh(made, ids, shuffled(made)).next(len(ids), len(ids))])
    config = AutoConfig.from_pretrained(directory)
    shape = shape_of(config, made.model.dtype)
    model = shape, rotary_tables(config, shape, 256), read(directory, shape, made.model.dtype), ids
    exact, ideal = reference.logits(*model), reference.logits(*model, kept=in_steps)
    crude = reference.logits(*model, kept=lambda numbers: in_steps(numbers, 63))
    assert distance(got, exact) < min(0.025, 0.65 * distance(crude, exact))
    if dtype == "float32":  # not less than that: a number between two steps may go to another one than in the reference
        assert distance(got, ideal) < 0.1 * distance(ideal, exact)
    else:
        assert distance(got, exact) < distance(reference.logits(*model, torch.bfloat16, in_steps), exact)


def test_a_token_takes_half_the_memory(saved: Callable[[str], Path]) -> None:
    """A head's numbers, and its two scales."""
    wide, small = (load(saved("qwen3"), NATIVE[BEST], KINDS[kind]) for kind in ("bfloat16", "bfloat16, kv int8"))
    layers, heads, size = 2, 2, 32
    assert wide.bytes_per_token == layers * heads * 2 * size * 2
    assert small.bytes_per_token == layers * heads * 2 * (size + 4)
    for made in (wide, small):
        pages = made.model.pages
        assert pages.numel() * pages.itemsize == made.bytes_per_token * made.num_blocks * made.block_size
        assert pages.data_ptr() % (2 << 20) == 0
