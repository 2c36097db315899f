"""The promise of equal bits on lesser processors than this one, and with more threads than it has cores.

Each environment takes a process of its own, in which everything is asserted; see `processors`. On a processor without
AVX-512 there is no lesser one to try.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.integration.worker_model.processors import LACK_BFLOAT16, MODELS, run
from worker.kernels.products import BASE_TILE, TILES

pytestmark = pytest.mark.timeout(300)

AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"


@cache
def found(environment: str, threads: int) -> dict[str, Any]:
    return run(environment, threads, native=environment not in LACK_BFLOAT16, few=True)


lesser = pytest.mark.skipif(not AVX512, reason="this processor has no more than what it would be kept from")


@pytest.mark.parametrize(
    ("environment", "threads", "form"),
    [
        pytest.param("AVX2", 2, "widened", marks=lesser),
        pytest.param("AVX-512", 1, "widened", marks=lesser),
        ("as it is", 3, None),  # three threads divide few sizes evenly: the ends of their shares fall anywhere
    ],
)
def test_equal_bits(environment: str, threads: int, form: str | None) -> None:
    """Which tiles keep their bits differs between processors; that they are exact, `processors` asserts."""
    results = found(environment, threads)
    assert [set(one) for one in results.values()] == [{"products", *MODELS}] * 2
    for one in results.values():
        for made in one["products"].values():
            *larger, base = map(int, made.split()[1].split("/"))
            assert base <= BASE_TILE
            assert larger == [tile for tile in (*TILES, 8, 4) if tile in larger and tile > base]
    if form is not None:
        assert results["bfloat16"]["products"]["576>192"].split()[0] == form


@lesser
def test_fingerprints_tell_processors_apart() -> None:
    """These two compute other bits."""
    here, lesser = found("as it is", 3), found("AVX2", 2)
    for dtype in ("bfloat16", "float32"):
        assert all(here[dtype][name]["fingerprint"] != lesser[dtype][name]["fingerprint"] for name in MODELS)
