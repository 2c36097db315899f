"""Which build of the native kernels is loaded, and what is said when there is none."""

from __future__ import annotations

import gc
import shutil
import threading

import numpy as np
import pytest
import torch

from tests.unit.worker.kernels.native import NATIVE
from worker.kernels.native import library
from worker.kernels.native.library import LEVELS, Native, NativeUnavailableError, address, best
from worker.sampling.scan import Scanner


@pytest.mark.skipif(shutil.which("g++") is None, reason="without a compiler nothing is built")
def test_what_every_processor_can_run_is_built() -> None:
    assert "portable" in NATIVE


@pytest.mark.skipif(not NATIVE, reason="nothing was built")
def test_the_best_that_runs_here_is_taken() -> None:
    found = best(2)
    assert found is not None
    assert (found.level, found.threads) == (next(iter(NATIVE)), 2)
    lesser = best(1, ("portable",))
    assert lesser is not None
    assert lesser.level == "portable"


def test_without_a_build_there_is_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(library, "_built", lambda _: False)
    with caplog.at_level("INFO"):
        assert best(1) is None
    assert "no native kernels" in caplog.text
    with pytest.raises(NativeUnavailableError, match="were not built when this package was installed"):
        Native("avx2", 1)


def test_a_build_for_other_processors_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_built", lambda _: True)
    monkeypatch.setattr(library, "_runs", lambda _: False)
    assert best(1) is None
    with pytest.raises(NativeUnavailableError, match="this processor can't run the kernels for amx"):
        Native("amx", 1)


def test_a_level_that_does_not_exist_is_named() -> None:
    with pytest.raises(NativeUnavailableError, match="no kernels are called 'sse9'; there are " + ", ".join(LEVELS)):
        Native("sse9", 1)


def test_an_address_is_given_of_what_was_expected_only() -> None:
    tensor = torch.zeros(3, 4)
    assert address(tensor, torch.float32, 3, 4) == tensor.data_ptr()
    for wrong in (tensor.double(), tensor[:2], tensor.t()):
        with pytest.raises(ValueError, match=r"is no torch.float32 \[3, 4\]"):
            address(wrong, torch.float32, 3, 4)
    with pytest.raises(ValueError, match="not contiguous"):
        address(torch.zeros(4, 4).t(), torch.float32, 4, 4)


@pytest.mark.skipif(not NATIVE, reason="nothing was built")
def test_threads_end_with_their_team() -> None:
    def count() -> int:
        with open("/proc/self/status") as status:  # noqa: PTH123
            return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))

    before = count()
    native = Native("portable", 5)
    rows, ones = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.float32)
    Scanner(native)(torch.zeros(64, 64), rows, ones)
    assert count() == before + 4
    del native
    gc.collect()
    assert count() == before
    assert threading.active_count() >= 1
