"""Which build of the native kernels is loaded, and what is said when there is none."""

from __future__ import annotations

import ctypes
import gc
import platform
import shutil
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from tests.unit.worker.kernels.native import NATIVE
from worker.kernels.native import library
from worker.kernels.native.library import LEVELS, Native, NativeUnavailableError, address, best
from worker.params import SamplingParams
from worker.sampling.draw import Draw
from worker.sampling.native import NativeSampler

if TYPE_CHECKING:
    from pathlib import Path


DRAW = Draw(0, SamplingParams(temperature=0.0), 0, 0)


@pytest.mark.skipif(shutil.which("g++") is None, reason="without a compiler nothing is built")
def test_every_level_of_this_kind_of_processor_is_built() -> None:
    x86 = platform.machine() in {"x86_64", "AMD64"}
    for level in LEVELS if x86 else ("portable",):
        assert library._load(level).built_from().decode() == library.sources_digest()
    assert "portable" in NATIVE


@pytest.mark.skipif(not NATIVE, reason="nothing was built")
def test_the_best_that_runs_here_is_taken() -> None:
    found = best(2)
    assert found is not None
    assert (found.level, found.threads) == (next(iter(NATIVE)), 2)
    lesser = best(1, ("portable",))
    assert lesser is not None
    assert lesser.level == "portable"


def test_without_a_build_there_is_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "_FOLDER", tmp_path)
    with caplog.at_level("WARNING"):
        assert best(1) is None
    assert "no native kernels, torch does all, slower: the kernels for amx were not built" in caplog.text
    with pytest.raises(NativeUnavailableError, match="were not built when this package was installed"):
        Native("avx2", 1)


def test_a_file_that_is_no_library_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "_FOLDER", tmp_path)
    for level in LEVELS:
        library._path(level).write_bytes(b"damaged")
    assert best(1) is None
    with pytest.raises(NativeUnavailableError, match="the kernels for avx2 can't be loaded"):
        Native("avx2", 1)


@pytest.mark.skipif(not NATIVE, reason="nothing was built")
def test_a_build_of_other_sources_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take other structures than it is given."""
    monkeypatch.setattr(library, "sources_digest", lambda: "0" * 64)
    assert best(1) is None
    with pytest.raises(NativeUnavailableError, match="older than their sources: install the package again"):
        Native("portable", 1)


@pytest.mark.skipif("portable" not in NATIVE, reason="nothing was built")
def test_a_better_build_that_is_missed_is_told_and_one_for_other_processors_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runnable = {b"avx2", b"portable"}
    native = Native("portable", 1)
    portable = SimpleNamespace(
        runs_level=lambda level: level in runnable,
        team_new=native._library.team_new,
        team_size=native._library.team_size,
        team_delete=native._library.team_delete,
    )

    def load(level: str) -> SimpleNamespace:
        if level == "portable":
            return portable
        raise NativeUnavailableError(f"the kernels for {level} are away")

    monkeypatch.setattr(library, "_load", load)
    for _ in range(2):
        found = best(1)
        assert found is not None
        assert found.level == "portable"
        runnable.discard(b"avx2")
    assert caplog.messages == ["native kernels for portable, not better ones: the kernels for avx2 are away"]


@pytest.mark.skipif(not NATIVE, reason="nothing was built")
def test_a_build_for_other_processors_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    lesser = SimpleNamespace(runs_level=lambda level: level in {b"avx2", b"portable"})
    load = library._load
    monkeypatch.setattr(library, "_load", lambda level: lesser if level == "portable" else load(level))
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

    gc.collect()  # teams of other tests, whose end would be counted
    before = count()
    native = Native("portable", 5)
    assert NativeSampler(native).draw(torch.zeros(64, 64), [DRAW])[0].token_id == 0
    assert count() == before + 4
    del native
    gc.collect()
    assert count() == before


@pytest.mark.skipif(not NATIVE, reason="nothing was built")
def test_teams_end_whatever_their_threads_are_about() -> None:
    """Asleep after a long wait, spinning, or just waking up."""
    for turn in range(300):
        native = Native("portable", 4)
        for _ in range(turn % 4):
            NativeSampler(native).draw(torch.zeros(2, 64), [DRAW, DRAW])
        if turn % 10 == 0:
            time.sleep(0.005)
        del native


class Nothing(ctypes.Structure):
    pass


@pytest.mark.skipif(not NATIVE, reason="nothing was built")
def test_a_second_caller_is_told() -> None:
    native = Native("portable", 1)
    with native._busy, pytest.raises(RuntimeError, match="at work for another caller"):
        native.call("sample", Nothing())
