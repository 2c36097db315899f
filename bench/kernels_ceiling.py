"""What this machine can do at most: bytes read in a second, and operations of products, both by our own threads."""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from bench.kernels_model import made_up
from bench.kernels_table import Peak
from bench.kernels_work import SIZES, layer_products
from worker.kernels.native import memory
from worker.kernels.native.library import address
from worker.kernels.products import multiplies_bfloat16
from worker.model.decoder.config import DecoderShape, LayerShape
from worker.model.decoder.native import SECTIONS
from worker.step import StepRow

if TYPE_CHECKING:
    from worker.kernels.native.library import Native

PIECE: Final = 1 << 16
"""Float32 numbers that a thread reads before it takes others; as many as some units of weights have."""
WIDTHS: Final = (512, 1024, 2048)
"""Inputs of products whose rows stay in a core's cache while all weights pass."""
ROWS: Final = 512
TURNS: Final = 5


class _Sweep(ctypes.Structure):
    """``Sweep`` of ``sweep.h``."""

    _fields_ = (
        ("numbers", ctypes.c_void_p),
        ("pieces", ctypes.c_int64),
        ("piece", ctypes.c_int64),
        ("sums", ctypes.c_void_p),
    )


class Memory:
    """So many bytes (rounded up) on huge pages, to be read again and again by all threads.

    Raises:
        MemoryError: there is no room for them.
    """

    def __init__(self, native: Native, size: int) -> None:
        self._native = native
        pieces = -(-size // (4 * PIECE))
        self._numbers = memory.zeros(pieces, PIECE, dtype=torch.float32)
        self._numbers.fill_(1.0)  # what was never written is the same few zeros everywhere, and those are in a cache
        self._sums = torch.zeros(pieces)
        self.bytes: Final = pieces * PIECE * 4
        self.best = 0.0
        """Bytes in a second, the most that was seen."""

    def read(self, turns: int = TURNS) -> float:
        """Reads all of it, several times; returns `best`."""
        pieces = len(self._numbers)
        sweep = _Sweep(
            numbers=address(self._numbers, torch.float32, pieces, PIECE),
            pieces=pieces,
            piece=PIECE,
            sums=address(self._sums, torch.float32, pieces),
        )
        for _ in range(turns):
            begin = time.perf_counter()
            self._native.call("sweep", sweep)
            self.best = max(self.best, self.bytes / (time.perf_counter() - begin))
        assert bool((self._sums == PIECE).all()), "not all was read"
        return self.best


def peak(native: Native, dtype: str) -> Peak:
    """The best of our own kernels on shapes that suit them, and of torch's product, which knows no int8 like ours."""
    candidates = [_own_peak(native, dtype, width) for width in WIDTHS]
    if dtype == "float32" or (dtype == "bfloat16" and multiplies_bfloat16()):  # else torch takes minutes for one
        candidates.append(_torch_peak(dtype))
    elif dtype == "bfloat16":
        candidates.append(_torch_peak("float32"))
    return max(candidates, key=lambda one: one.operations_per_s)


def ideal_shape(width: int) -> DecoderShape:
    """One layer whose products all have ``width`` inputs."""
    return DecoderShape(
        family="made up",
        vocab=64,
        hidden=width,
        heads=width // 64,
        kv_heads=width // 64,
        head_dim=64,
        intermediate=width,
        norm_eps=1e-5,
        norm_offset=0.0,
        activation="silu",
        embed_scale=1.0,
        attention_scale=0.125,
        attention_softcap=0.0,
        logit_softcap=0.0,
        qk_norm=False,
        sandwich=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        rotary_dim=64,
        ropes=(),
        layers=(LayerShape(window=0, rope=-1),),
        tied=True,
    )


def _own_peak(native: Native, dtype: str, width: int) -> Peak:
    """Of one layer's products, the best."""
    shape = ideal_shape(width)
    kind = torch.float32 if dtype == "float32" else torch.bfloat16
    runner = made_up(native, shape, kind, quantized=dtype == "int8", tokens=ROWS)
    table = list(range(runner.num_blocks))
    row = StepRow([index % shape.vocab for index in range(ROWS)], 0, table, 1)
    least = np.full(len(SECTIONS), np.iinfo(np.int64).max)
    for _ in range(TURNS):
        runner.nanoseconds = np.zeros(len(SECTIONS), dtype=np.int64)
        runner.forward([row])
        least = np.minimum(least, runner.nanoseconds)
    found = {
        name: 1e9 * work.operations / max(int(least[SECTIONS.index(name)]), 1)
        for name, work in layer_products(shape, ROWS, SIZES[dtype]).items()
    }
    best = max(found, key=lambda name: found[name])
    return Peak(found[best], f"our {best} of {ROWS} rows and {width} inputs")


def _torch_peak(dtype: str) -> Peak:
    kind = getattr(torch, dtype)
    size = max(WIDTHS)
    left, right = torch.randn(size, size).to(kind), torch.randn(size, size).to(kind)
    out = torch.empty(size, size, dtype=kind)
    least = float("inf")
    for _ in range(TURNS):
        begin = time.perf_counter()
        torch.mm(left, right, out=out)
        least = min(least, time.perf_counter() - begin)
    return Peak(2 * size**3 / least, f"torch's {dtype} product of {size} by {size} by {size}")
