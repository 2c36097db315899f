"""What a step of a decoder has to do, part by part: bytes and operations, from shapes alone. Pure.

Bytes are those that a part can't do without: weights, and keys and values of a sequence, are read once, numbers that
come in and go out are read and written once, none is padded. What lies in a cache counts too, so that a part whose
numbers are few can be faster than memory. Operations are additions and multiplications: two for each weight and row of
a product, four for each key that a query sees and number of its head, four for each number of a norm, three for each
number that is rotated. What else there is (exp, rounding, comparing) counts nothing. In eight bits, rows are in two
halves and products take twice as many operations of the processor; they count once here, as in the other kinds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker.model.decoder.config import DecoderShape

F32: Final = 4
"""Bytes of a float32 number: of residual stream, products' sums, scales, logits."""
PRODUCTS: Final = ("qkv", "output", "gate_up", "down", "head")


@dataclass(frozen=True, slots=True)
class Load:
    """A step: ``sequences`` of so many ``new`` tokens each, after ``context`` others; logits of each's last token."""

    sequences: int
    new: int
    context: int

    @property
    def rows(self) -> int:
        return self.sequences * self.new

    @property
    def name(self) -> str:
        """For people."""
        if self.new == 1:
            return f"decode {self.sequences} at {self.context}"
        return f"prompt of {self.new}" + (f" after {self.context}" if self.context else "")

    def keys_seen(self, window: int) -> int:
        """By all rows of one sequence together; ``window`` as ``LayerShape`` has it."""
        positions = range(self.context, self.context + self.new)
        return sum(min(position + 1, window) if window else position + 1 for position in positions)

    def keys_read(self, window: int) -> int:
        """Positions of one sequence that any of its rows sees."""
        length = self.context + self.new
        return min(length, window + self.new - 1) if window else length


@dataclass(frozen=True, slots=True)
class Work:
    """Of a part, in one step."""

    bytes: int = 0
    operations: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.operations + other.operations)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a number."""

    rows: int
    """Of what products take, and of keys and values."""
    weights: int
    """Of the layers' weights; less than ``rows`` where they are in eight bits, with a scale for each output."""

    @property
    def quantized(self) -> bool:
        return self.weights < self.rows


SIZES: Final = {"bfloat16": Sizes(2, 2), "float32": Sizes(4, 4), "int8": Sizes(2, 1)}


def work_of(section: str, shape: DecoderShape, load: Load, dtype: str) -> Work:
    """What a section of ``worker.model.decoder.native.SECTIONS`` does in a step.

    Raises:
        KeyError: no such section is known here.
    """
    return _SECTIONS[section](shape, load, SIZES[dtype])


def sampling_work(rows: int, vocab: int) -> Work:
    """Logits are read once. What choosing computes depends on them, and counts nothing."""
    return Work(rows * vocab * F32)


def product(rows: int, inputs: int, outputs: int, *, weight: int, row: int, out: int, scaled: bool = False) -> Work:
    """``weight``, ``row``, ``out``: bytes of a number of each."""
    moved = inputs * outputs * weight + rows * (inputs * row + outputs * out) + scaled * outputs * F32
    return Work(moved, 2 * rows * inputs * outputs)


def layer_products(shape: DecoderShape, rows: int, sizes: Sizes) -> dict[str, Work]:
    """Of one layer, by section. What is added to the residual stream is read and written; of gates and ups that are
    computed together only half as many numbers go out."""
    query = shape.heads * shape.head_dim
    widths = {
        "qkv": (shape.hidden, query + 2 * shape.kv_heads * shape.head_dim, F32),
        "output": (query, shape.hidden, 2 * F32),
        "gate_up": (shape.hidden, 2 * shape.intermediate, sizes.rows / 2),
        "down": (shape.intermediate, shape.hidden, 2 * F32),
    }
    made = {}
    for name, (inputs, outputs, out) in widths.items():
        whole = product(rows, inputs, outputs, weight=sizes.weights, row=sizes.rows, out=0, scaled=sizes.quantized)
        made[name] = whole + Work(int(rows * outputs * out))
    return made


def _product(name: str) -> Callable[[DecoderShape, Load, Sizes], Work]:
    def work(shape: DecoderShape, load: Load, sizes: Sizes) -> Work:
        one = layer_products(shape, load.rows, sizes)[name]
        return Work(one.bytes * len(shape.layers), one.operations * len(shape.layers))

    return work


def _head(shape: DecoderShape, load: Load, sizes: Sizes) -> Work:
    """Not in eight bits, and only after the last tokens."""
    return product(load.sequences, shape.hidden, shape.vocab, weight=sizes.rows, row=sizes.rows, out=F32)


def _norm(shape: DecoderShape, load: Load, sizes: Sizes) -> Work:
    """Two or four of each layer, and the last one. Those behind attention and MLP add to the residual stream."""
    inner = len(shape.layers) * load.rows * shape.hidden
    last = load.sequences * shape.hidden
    before, behind = F32 + sizes.rows, 3 * F32
    moved = (2 * inner + last) * before + (2 * inner * behind if shape.sandwich else 0)
    return Work(moved, 4 * ((4 if shape.sandwich else 2) * inner + last))


def _halve(shape: DecoderShape, load: Load, sizes: Sizes) -> Work:
    """Rows of four products become two halves of eight bits and a scale; only where weights are in eight bits."""
    if not sizes.quantized:
        return Work()
    inputs = 2 * shape.hidden + shape.heads * shape.head_dim + shape.intermediate
    return Work(len(shape.layers) * load.rows * (inputs * (sizes.rows + 2) + 4 * F32))


def _write(shape: DecoderShape, load: Load, sizes: Sizes) -> Work:
    """Queries, keys and values come as float32; queries and keys are rotated. Angles are few and count nothing."""
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    moved = (query + 2 * key) * (F32 + sizes.rows)
    turned = sum(layer.rope >= 0 for layer in shape.layers) * (shape.heads + shape.kv_heads) * shape.rotary_dim
    normed = len(shape.layers) * (query + key) if shape.qk_norm else 0
    return Work(len(shape.layers) * load.rows * moved, load.rows * (3 * turned + 4 * normed))


def _attend(shape: DecoderShape, load: Load, sizes: Sizes) -> Work:
    """Queries come in, as many numbers go out, and of keys and values each position that is seen is read once."""
    total = Work()
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for layer in shape.layers:
        read = 2 * key * load.keys_read(layer.window) * load.sequences
        total += Work(
            (read + 2 * query * load.rows) * sizes.rows, 4 * query * load.keys_seen(layer.window) * load.sequences
        )
    return total


def _embed(shape: DecoderShape, load: Load, sizes: Sizes) -> Work:
    return Work(load.rows * shape.hidden * (sizes.rows + F32), load.rows * shape.hidden)


_SECTIONS: Final[dict[str, Callable[[DecoderShape, Load, Sizes], Work]]] = {
    "prepare": lambda _shape, _load, _sizes: Work(),
    "embed": _embed,
    "norm": _norm,
    "halve": _halve,
    "qkv": _product("qkv"),
    "write": _write,
    "attend": _attend,
    "output": _product("output"),
    "gate_up": _product("gate_up"),
    "down": _product("down"),
    "head": _head,
}
