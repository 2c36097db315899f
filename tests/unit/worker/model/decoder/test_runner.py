"""The fused decoder on pages, by every build of the kernels that runs here."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoConfig

from tests.unit.worker.kernels.native import NATIVE, TEAMS
from tests.unit.worker.model import tiny
from tests.unit.worker.model.decoder import models, reference
from tests.unit.worker.model.tiny import Text
from worker.model.decoder import runner as decoder
from worker.model.decoder.config import NotFused, rotary_tables, shape_of
from worker.model.decoder.native import pack, packed_shape, quantized
from worker.model.decoder.weights import DecoderWeights, read
from worker.step import NotFinite, StepRow

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from worker.kernels.native.library import Native

pytestmark = pytest.mark.skipif(not NATIVE, reason="no compiler was found when the package was installed")


@dataclass(frozen=True, slots=True)
class Kind:
    """What a model's numbers are."""

    dtype: torch.dtype
    """int8: of the matrices. All else is bfloat16."""
    eight_bit_pages: bool = False


KINDS = {
    "bfloat16": Kind(torch.bfloat16),
    "float32": Kind(torch.float32),
    "int8": Kind(torch.int8),
    "bfloat16, kv int8": Kind(torch.bfloat16, eight_bit_pages=True),
    "float32, kv int8": Kind(torch.float32, eight_bit_pages=True),
    "int8, kv int8": Kind(torch.int8, eight_bit_pages=True),
}
BEST = next(iter(NATIVE), "")
SOME = ("llama", "gemma3", "qwen3", "phi3", "odd")
"""With windows, norms of heads, and norms behind; and sizes that are multiples of nothing."""
CASES = [
    *((name, label) for name in SOME for label in ("bfloat16", "float32", "int8")),
    *((name, "bfloat16, kv int8") for name in ("gemma3", "qwen3", "odd")),
    *((name, "float32, kv int8") for name in ("gemma3", "phi3")),
    ("llama", "int8, kv int8"),
]
"""Models and kinds. With pages of eight bits each model and each kind once or more: all pairs would take too long."""
FEW = [
    *(("odd", "bfloat16"), ("qwen3", "float32"), ("llama", "int8")),
    *(("gemma3", "bfloat16, kv int8"), ("phi3", "float32, kv int8"), ("llama", "int8, kv int8")),
]
"""Each model and each kind once or more, for all builds but the best: they are of one source."""
each_case = pytest.mark.parametrize(
    ("name", "kind", "level"), [(*case, level) for level in NATIVE for case in (CASES if level == BEST else FEW)]
)
LENGTH = 150
"""More than two runs of keys."""


def load(
    directory: Path,
    native: Native,
    kind: Kind = KINDS["bfloat16"],
    *,
    context: int = 256,
    num_blocks: int = 400,
    block_size: int = 16,
) -> decoder.DecoderRunner:
    """On pages that all hold NaN."""
    eight = kind.dtype == torch.int8
    files = tiny.files(directory, torch.bfloat16 if eight else kind.dtype, context_length=context, quantized=eight)
    made = decoder.load(
        files,
        native,
        num_blocks=num_blocks,
        block_size=block_size,
        eight_bit_pages=kind.eight_bit_pages,
        progress=lambda _: None,
    )
    tiny.poison(made)
    return made


def fresh(made: decoder.DecoderRunner, ids: list[int], free: list[int]) -> Text:
    return Text(ids, [free.pop() for _ in range(-(-len(ids) // made.block_size))])


def shuffled(made: decoder.DecoderRunner) -> list[int]:
    free = list(range(made.num_blocks))
    random.Random(1).shuffle(free)
    return free


@pytest.mark.parametrize("name", models.CONFIGS)
def test_logits_are_the_references(saved: Callable[[str], Path], name: str) -> None:
    """In float32 as near as rounding allows; in bfloat16 nearer than a model whose every operation rounds to it."""
    context = {"llama dynamic": 128, "phi3 longrope": 96}.get(name, 256)
    ids = tiny.tokens(min(LENGTH, context))
    config = AutoConfig.from_pretrained(saved(name))
    for dtype in (torch.bfloat16, torch.float32, torch.int8):
        read_as = torch.bfloat16 if dtype == torch.int8 else dtype
        shape = shape_of(config, read_as)
        weights, tables = read(saved(name), shape, read_as), rotary_tables(config, shape, context)
        if dtype == torch.int8:
            weights = rounded_to_eight_bits(weights)
        expected = reference.logits(shape, tables, weights, ids)
        rounded = reference.logits(shape, tables, weights, ids, torch.bfloat16)
        for level, native in NATIVE.items():
            made = load(saved(name), native, Kind(dtype), context=context)
            got = made.forward([fresh(made, ids, shuffled(made)).next(len(ids), len(ids))])
            assert got.shape == expected.shape
            near = 1e-5 if dtype == torch.float32 else distance(rounded, expected)
            assert distance(got, expected) < near, (level, dtype)


def rounded_to_eight_bits(weights: DecoderWeights) -> DecoderWeights:
    """As matrices of float32."""

    def rounded(matrix: torch.Tensor) -> torch.Tensor:
        whole, scales = quantized(matrix)
        return whole * scales[:, None]

    matrices = ("qkv", "output", "gate", "up", "down")
    layers = [replace(layer, **{name: rounded(getattr(layer, name)) for name in matrices}) for layer in weights.layers]
    return replace(weights, layers=tuple(layers))


def distance(some: torch.Tensor, others: torch.Tensor) -> float:
    return float((some - others).norm() / others.norm())


@each_case
def test_a_token_has_the_same_bits_on_every_path(
    saved: Callable[[str], Path], name: str, kind: str, level: str
) -> None:
    """Whole, token by token, in odd chunks beside 31 others, on another's prefix, on blocks of another size, and with
    more threads: from pages full of NaN."""
    ids = tiny.tokens(LENGTH)
    made = load(saved(name), NATIVE[level], KINDS[kind])
    free = shuffled(made)
    whole = made.forward([fresh(made, ids, free).next(LENGTH, LENGTH)]).clone()
    solo = tiny.feed(made, fresh(made, ids, free), *[1] * 70, 37, *[1] * 43)
    crowded = load(saved(name), TEAMS[level], KINDS[kind], num_blocks=160, block_size=64)
    free = shuffled(crowded)
    mixed = fresh(crowded, ids, free)
    company = [fresh(crowded, tiny.tokens(140, seed), free) for seed in range(31)]
    for count in (33, 1, 1, 5, 70, 1, 1, 17, 1, 20):
        share = [(near, min(1 + index % 5, 140 - near.done)) for index, near in enumerate(company) if near.done < 140]
        tiny.step(crowded, *share[::2], (mixed, count), *share[1::2])
    prefix = fresh(made, ids, shuffled(made)[:40])
    prefix.table[:4], prefix.done = solo.table[:4], 64
    tiny.feed(made, prefix, 36, 5, 1)
    for path in (solo, mixed, prefix):
        for length, logits in path.logits.items():
            assert torch.equal(logits, whole[length - 1]), length
    assert made.fingerprint == crowded.fingerprint


@pytest.mark.parametrize("level", NATIVE)
@pytest.mark.parametrize("kind", ["bfloat16", "bfloat16, kv int8"])
def test_copied_blocks_are_read_like_the_first(saved: Callable[[str], Path], kind: str, level: str) -> None:
    made = load(saved("llama"), NATIVE[level], KINDS[kind])
    first = Text(tiny.tokens(40), [7, 3, 9])
    tiny.feed(made, first, 39)
    made.copy_blocks([(7, 100), (3, 50), (9, 2)])
    tiny.poison_blocks(made, [7, 3, 9])
    second = Text(first.ids, [100, 50, 2], done=39)
    tiny.feed(made, second)
    assert torch.equal(second.logits[40], first.logits[40])


@pytest.mark.parametrize("level", NATIVE)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_in_its_sequence(saved: Callable[[str], Path], kind: str, level: str) -> None:
    made = load(saved("gemma2"), TEAMS[level], KINDS[kind])
    free = shuffled(made)
    broken = 17
    whole = made.model.embedding[broken].clone()
    for value in (torch.nan, torch.inf, 3e38):
        texts = [fresh(made, [min(token, 16) for token in tiny.tokens(50, seed)], free) for seed in range(5)]
        expected = made.forward([text.next(50) for text in texts]).clone()
        texts[2].ids[30] = broken
        made.model.embedding[broken] = value
        got = made.forward([text.next(50) for text in texts])
        assert got[2].isnan().all(), value
        assert torch.equal(got[[0, 1, 3, 4]], expected[[0, 1, 3, 4]]), value
        with pytest.raises(NotFinite):
            made.forward([text.next(50, 0) for text in texts])
        again = made.forward([text.next(50) for text in texts[3:]])
        assert torch.equal(again, expected[3:]), value
        made.model.embedding[broken] = whole


def test_only_rows_that_want_logits_get_them(saved: Callable[[str], Path]) -> None:
    made = load(saved("qwen2"), NATIVE[BEST])
    free = shuffled(made)
    texts = [fresh(made, tiny.tokens(30, seed), free) for seed in range(3)]
    every = made.forward([text.next(30, 30) for text in texts]).clone().view(3, 30, -1)
    got = made.forward([text.next(30, count) for text, count in zip(texts, (2, 0, 5), strict=True)])
    assert torch.equal(got, torch.cat([every[0, -2:], every[2, -5:]]))
    assert made.forward([texts[1].next(30, 0)]).shape == (0, made.vocab_size)


def test_what_can_not_be_fused_is_refused(saved: Callable[[str], Path]) -> None:
    files = tiny.files(saved("llama"), torch.bfloat16)
    with pytest.raises(NotFused, match="blocks of 8 tokens are no multiple of 16"):
        decoder.load(files, NATIVE[BEST], num_blocks=4, block_size=8, progress=lambda _: None)
    elsewhere = replace(files, device=torch.device("cuda"))
    with pytest.raises(NotFused, match="device cuda"):
        decoder.load(elsewhere, NATIVE[BEST], num_blocks=4, block_size=16, progress=lambda _: None)


def test_the_fingerprint_tells_models_types_and_processors_apart(saved: Callable[[str], Path]) -> None:
    here = load(saved("llama"), NATIVE[BEST]).fingerprint
    assert here == load(saved("llama"), TEAMS[BEST], num_blocks=33).fingerprint
    assert here != load(saved("llama"), NATIVE[BEST], KINDS["float32"]).fingerprint
    assert here != load(saved("llama"), NATIVE[BEST], KINDS["bfloat16, kv int8"]).fingerprint
    assert here != load(saved("llama biases"), NATIVE[BEST]).fingerprint
    if {"avx512_bf16", "avx2"} <= set(NATIVE):
        levels = {
            load(saved("llama"), NATIVE[level]).fingerprint
            for level in ("amx", "avx512_bf16", "avx2")
            if level in NATIVE
        }
        assert len(levels) == len({"amx", "avx512_bf16", "avx2"} & set(NATIVE))


def test_other_users_of_the_processor_do_no_harm(saved: Callable[[str], Path]) -> None:
    """Tiles are set up anew for each call: torch's own products leave them in another state, or in none."""
    made = load(saved("llama"), NATIVE[BEST])
    text = fresh(made, tiny.tokens(100), shuffled(made))
    expected = made.forward([text.next(100)]).clone()
    matrix = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    for _ in range(3):
        assert (matrix @ matrix).isfinite().all()
        assert torch.equal(made.forward([text.next(100)]), expected)


def test_eight_bits_are_within_half_a_step() -> None:
    matrix = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    matrix[3] = 0
    whole, scales = quantized(matrix)
    assert whole.dtype == torch.int8
    assert whole.abs().amax(dim=1).tolist() == [127, 127, 127, 0, 127]
    assert bool(((whole * scales[:, None] - matrix).abs() <= scales[:, None] * 0.5001).all())


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32], ids=str)
def test_packed_weights_lie_where_the_kernels_look(dtype: torch.dtype) -> None:
    matrix = torch.arange(35 * 70).remainder(100).view(35, 70).to(dtype)
    out = torch.full(packed_shape(matrix, dtype), 99, dtype=dtype)
    pack(matrix, out)
    units, packs, two, lanes, size = out.shape
    assert (units, packs * size, two, lanes) == (2, 128 if dtype == torch.int8 else 96, 2, 16)
    for output, number in ((0, 0), (17, 33), (31, 69), (34, 68)):
        unit, rest = divmod(output, 32)
        assert out[unit, number // size, rest // 16, rest % 16, number % size] == matrix[output, number]
    assert int((out != 0).sum()) == int((matrix != 0).sum())


def test_rows_beyond_the_tokenizer_are_never_offered(saved: Callable[[str], Path]) -> None:
    files = tiny.files(saved("qwen2"), torch.bfloat16, context_length=256, vocab_size=models.VOCAB - 20)
    made = decoder.load(files, NATIVE[BEST], num_blocks=9, block_size=16, progress=lambda _: None)
    assert made.vocab_size == models.VOCAB - 20
    assert made.forward([StepRow(tiny.tokens(30), 0, [3, 1], 4)]).shape == (4, models.VOCAB - 20)


def test_what_there_is_not_is_refused_before_the_kernels_see_it(saved: Callable[[str], Path]) -> None:
    made = load(saved("qwen2"), NATIVE[BEST], num_blocks=9)
    for row, message in (
        (StepRow([models.VOCAB], 0, [1], 1), "a token id is not 0 to 130: 131 to 131"),
        (StepRow([-1], 0, [1], 1), "a token id is not 0 to 130"),
        (StepRow([5], 256, [*range(9), *range(9)], 1), "a position is not 0 to 255: 256 to 256"),
        (StepRow([5], 0, [9], 1), "a block is not 0 to 8: 9 to 9"),
        (StepRow([5] * 17, 0, [1], 1), "a block table is too short"),
        (StepRow([5] * 2, 0, [1], 3), "wants logits of more tokens than it has"),
        (StepRow([], 0, [1], 0), "a row has no tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            made.forward([row])
