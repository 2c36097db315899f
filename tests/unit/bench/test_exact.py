from __future__ import annotations

from typing import TYPE_CHECKING

from bench import exact
from bench.exact import EXACT_COLUMNS, ExactConfig, exact_cells, measure, run_exact

if TYPE_CHECKING:
    import pytest


def test_every_operation_is_measured_at_every_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "HEAD", (96, 576))
    notes: list[str] = []
    results = run_exact(ExactConfig(rows=(1, 20), turns=2, layers=1), notes.append)
    names = [operation["operation"] for operation in results["operations"]]
    assert len(names) == len(notes) == 14
    assert [operation["rows"] for operation in results["operations"][:4]] == [1, 20, 1, 20]
    assert {name.split(",")[0] for name in names} >= {"products of 1 layers", "product of the head", "SiLU of a layer"}
    assert all(operation["exact_s"] > 0 and operation["plain_s"] > 0 for operation in results["operations"])
    assert all(len(exact_cells(operation)) == len(EXACT_COLUMNS) for operation in results["operations"])


def test_ratios_are_those_of_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways take turns; the first turn only warms up."""
    times = iter([9.0, 9.0, 1.0, 2.0, 4.0, 2.0, 3.0, 1.0])
    monkeypatch.setattr(exact, "_seconds", lambda call: next(times))
    assert measure(lambda: None, lambda: None, turns=3) == {"exact_s": 3.0, "plain_s": 2.0, "ratio": 2.0, "spread": 0.5}
