"""What all of the worker's unit tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.unit.worker.sampling import SAMPLERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worker.sampling.draw import Sampler


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from threads, and on a busy machine spinning ones cost a minute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=SAMPLERS)
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return SAMPLERS[request.param]
