"""What workers of batches see to besides, and what is thrown away."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from kvstore.batches import Batch, BatchState
from kvstore.errors import BrokerUnreachable
from ops.batch import chores as module
from ops.batch.chores import Chore, Chores
from ops.batch.tidy import forgotten
from ops.batch.worker import scheduled

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


class Store:
    """Stands where that of batches does."""

    def __init__(self, *due: bool | Exception) -> None:
        self.told = list(due)
        self.known: set[str] = set()

    def due(self, _chore: str, _every_s: int) -> bool:
        told = self.told.pop(0)
        if isinstance(told, Exception):
            raise told
        return told

    def get(self, batch_id: str) -> Batch | None:
        return Batch(batch_id, BatchState.COMPLETED) if batch_id in self.known else None


def test_what_is_scheduled() -> None:
    assert scheduled("", 5, 0) == []
    assert scheduled("f", 5, 7) == [
        Chore("warm", 5, ("batch", "warm", "f")),
        Chore("tidy", 7, ("batch", "tidy")),
    ]


def test_one_that_is_due_runs_once_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    monkeypatch.setattr(
        module, "follow_parent", lambda _: [sys.executable, "-c", f"open({str(ran)!r}, 'a').write('x')"]
    )
    store: Any = Store(False, BrokerUnreachable("away"), True, False)
    chores = Chores(store, [Chore("c", 5, ())])
    chores.look()
    chores.look()
    assert chores._running == {}
    chores.look()
    chores._running["c"].wait()
    assert ran.read_text() == "x"
    chores.look()
    assert (chores._running, store.told) == ({}, [])


def test_one_that_runs_is_not_asked_for_again_and_ends_with_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "follow_parent", lambda _: [sys.executable, "-c", "import time; time.sleep(60)"])
    chores = Chores(Store(True), [Chore("c", 5, ())])  # type: ignore[arg-type]
    chores.look()
    chores.look()
    chores.end()
    assert chores._running["c"].returncode == -15


def test_only_old_batches_that_nobody_knows_are_thrown_away(tmp_path: Path) -> None:
    store: Any = Store()
    for name, old in (("batch_old", True), ("batch_known", True), ("batch_young", False), ("files", True)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "input.jsonl").touch()
        if old:
            os.utime(tmp_path / name / "input.jsonl", (5, 5))
            os.utime(tmp_path / name, (5, 5))
    store.known.add("batch_known")
    assert forgotten(store, tmp_path, 3600.0) == 1
    assert sorted(each.name for each in tmp_path.iterdir()) == ["batch_known", "batch_young", "files"]
