"""Steps whose times follow a rule, in a model's place for tests of `octavo tune`."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from bench.tune import TuneConfig
from bench.tune_pool import neighbours
from bench.waste import measure_waste

if TYPE_CHECKING:
    from collections.abc import Sequence

SMALL = TuneConfig(
    block_sizes=(32, 16), block_runs=(8, 1), contexts=(320, 64), sequences=(1, 3), rounds=3, requests=1, kv_tokens=2048
)

known_waste = cache(measure_waste)
"""Found once for all tests: it is the same each time, and takes a whole load."""


class RuledSubject:
    """Steps that take a millisecond for each sequence, and another for each block that doesn't follow its neighbour."""

    level, threads, dtype, context_length = "portable", 1, "float32", 4096

    def __init__(self, kv_tokens: int = 2048) -> None:
        self.asked: list[tuple[int, int, int]] = []
        self._kv_tokens = kv_tokens

    def num_blocks(self, block_size: int) -> int:
        return self._kv_tokens // block_size

    def step(self, block_size: int, tables: Sequence[list[int]], context: int) -> float:
        self.asked.append((context, len(tables), block_size))
        assert all(len(table) == -(-context // block_size) for table in tables)
        behind, could = neighbours(tables)
        return (len(tables) + could - behind) / 1000


class InterruptedSubject(RuledSubject):
    """Ctrl-C comes within a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._left = step

    def step(self, block_size: int, tables: Sequence[list[int]], context: int) -> float:
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt
        return super().step(block_size, tables, context)
