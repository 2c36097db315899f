"""`octavo bench exact`: what equal bits cost, operation by operation, against torch's own way on the same machine.

Sizes are those of SmolLM2-135M. Both ways take turns, so that whatever else the machine does disturbs them alike; times
are medians, the ratio is the median of the turns' ratios, and the spread tells how quiet the machine was.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from bench.machine import describe_machine
from bench.stats import percentile
from worker.kernels.attention import PagedAttention
from worker.kernels.cores import LayerSpec
from worker.kernels.elementwise import RowExactActivation
from worker.kernels.linear import RowExactLinear, padded_rows
from worker.kernels.plan import PoolShape
from worker.step import StepRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

LAYER: Final = ((576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536))
"""Weights of a layer, ``(out_features, in_features)``."""
HEAD: Final = (49152, 576)
SPEC: Final = LayerSpec(heads=9, kv_heads=3, head_size=64, scaling=64**-0.5)
BLOCK_SIZE: Final = 16
CONTEXT: Final = 300
"""Tokens before the one that is decoded."""

EXACT_COLUMNS: Final = ("operation", "rows", "exact", "plain", "ratio", "spread")


@dataclass(frozen=True, slots=True)
class ExactConfig:
    """One run."""

    rows: tuple[int, ...] = (1, 8, 32, 128, 512)
    dtype: str = "bfloat16"
    turns: int = 15
    """Of each measurement."""
    layers: int = 30
    threads: int = 0
    """0: as torch decides."""


@torch.inference_mode()
def run_exact(config: ExactConfig, note: Callable[[str], None]) -> dict[str, Any]:
    """Measures everything; returns what is printed as JSON, times in seconds."""
    if config.threads:
        torch.set_num_threads(config.threads)
    dtype = getattr(torch, config.dtype)
    torch.manual_seed(0)
    found: list[dict[str, Any]] = []
    for kind in (_products, _activations, _decoding, _prompts):
        for rows, name, exact, plain in kind(config, dtype):
            note(f"{name}, {rows} rows")
            found.append({"operation": name, "rows": rows, **measure(exact, plain, config.turns)})
    return {
        "machine": describe_machine(),
        "config": asdict(config),
        "threads": torch.get_num_threads(),
        "operations": found,
    }


def measure(exact: Callable[[], object], plain: Callable[[], object], turns: int) -> dict[str, float]:
    """Medians of both, of their ratio, and how far apart the quarters of the exact times are, as a share."""
    times: list[tuple[float, float]] = []
    for turn in range(turns + 1):
        first, second = _seconds(exact), _seconds(plain)
        if turn:
            times.append((first, second))
    exacts = [first for first, _ in times]
    middle = percentile(exacts, 50)
    return {
        "exact_s": middle,
        "plain_s": percentile([second for _, second in times], 50),
        "ratio": percentile([first / second for first, second in times], 50),
        "spread": (percentile(exacts, 75) - percentile(exacts, 25)) / middle,
    }


def exact_cells(operation: dict[str, Any]) -> tuple[Any, ...]:
    """A line of the table."""
    return (
        operation["operation"],
        operation["rows"],
        f"{operation['exact_s'] * 1000:.2f} ms",
        f"{operation['plain_s'] * 1000:.2f} ms",
        f"{operation['ratio']:.2f}",
        f"{operation['spread']:.0%}",
    )


Measured = tuple[int, str, "Callable[[], object]", "Callable[[], object]"]


def _products(config: ExactConfig, dtype: torch.dtype) -> Iterator[Measured]:
    """All layers', and the head's: in tiles, with as many rows as a step is padded to."""
    for name, shapes in (
        (f"products of {config.layers} layers", LAYER * config.layers),
        ("product of the head", [HEAD]),
    ):
        weights = [torch.randn(shape).to(dtype) for shape in shapes]
        exact = [RowExactLinear(weight, None) for weight in weights]
        for rows in config.rows:
            real = {width: torch.randn(rows, width).to(dtype) for width in (576, 1536)}
            padded = {width: F.pad(x, (0, 0, 0, padded_rows(rows) - rows)) for width, x in real.items()}
            yield rows, name, partial(_layers, exact, padded), partial(_weights, weights, real)


def _layers(layers: Sequence[RowExactLinear], given: Mapping[int, torch.Tensor]) -> object:
    return [layer(given[layer.in_features]) for layer in layers]


def _weights(weights: Sequence[torch.Tensor], given: Mapping[int, torch.Tensor]) -> object:
    return [F.linear(given[weight.shape[1]], weight) for weight in weights]


def _activations(config: ExactConfig, dtype: torch.dtype) -> Iterator[Measured]:
    exact = RowExactActivation(nn.SiLU())
    for rows in config.rows:
        real = torch.randn(rows, 1536).to(dtype)
        padded = torch.randn(padded_rows(rows), 1536).to(dtype)
        yield rows, "SiLU of a layer", partial(exact, padded), partial(F.silu, real)


def _decoding(config: ExactConfig, dtype: torch.dtype) -> Iterator[Measured]:
    """One token of each sequence, against SDPA over exactly its keys, which lie side by side."""
    for rows in config.rows:
        blocks = -(-(CONTEXT + 1) // BLOCK_SIZE)
        tables = [list(range(row * blocks, (row + 1) * blocks)) for row in range(rows)]
        yield from _attention(
            f"attention, {CONTEXT + 1} keys, of a layer",
            [StepRow([0], CONTEXT, table, 1) for table in tables],
            rows,
            dtype,
            (rows, 1, CONTEXT + 1),
        )


def _prompts(config: ExactConfig, dtype: torch.dtype) -> Iterator[Measured]:
    """The first so many tokens of one sequence, against causal SDPA."""
    for rows in config.rows:
        table = list(range(-(-rows // BLOCK_SIZE)))
        yield from _attention(
            "attention in a prompt, of a layer", [StepRow([0] * rows, 0, table, 1)], rows, dtype, (1, rows, rows)
        )


def _attention(
    name: str, steps: list[StepRow], rows: int, dtype: torch.dtype, sizes: tuple[int, int, int]
) -> Iterator[Measured]:
    """Ours with pages written and read, and on pages that were gathered before; ``sizes``: batch, queries, keys."""
    blocks = 1 + max(block for step in steps for block in step.block_table)
    attention = PagedAttention([SPEC], PoolShape(blocks, BLOCK_SIZE), dtype, torch.device("cpu"))
    plan = attention.plan(steps)
    query, key, value = (
        torch.randn(1, heads, plan.tokens, SPEC.head_size).to(dtype)
        for heads in (SPEC.heads, SPEC.kv_heads, SPEC.kv_heads)
    )
    batch, queries, keys = sizes
    whole = torch.randn(batch, SPEC.heads, queries, SPEC.head_size).to(dtype)
    side = torch.randn(2, batch, SPEC.kv_heads, keys, SPEC.head_size).to(dtype)

    def plain() -> object:
        causal = queries > 1
        return F.scaled_dot_product_attention(whole, side[0], side[1], is_causal=causal, enable_gqa=True)

    core = attention.methods[0].core
    gathered = [
        (
            torch.randn(one.tiles, SPEC.kv_heads, one.width * SPEC.group, SPEC.head_size).to(dtype),
            torch.randn(2, one.tiles, SPEC.kv_heads, one.keys, SPEC.head_size).to(dtype),
            one,
        )
        for one in plan.layer(attention.methods[0].heads).batches
    ]

    def cores() -> object:
        return [core(given, pages[0], pages[1], one, SPEC.scaling, 0.0) for given, pages, one in gathered]

    yield rows, name, cores, plain
    yield rows, f"{name}, with pages", lambda: attention.attend(0, plan, query, key, value), plain


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
