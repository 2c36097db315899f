"""The table of known kinds of faults: every kind has a row, and every test that a row names exists."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parents[1]
COUNTS = {"A": 20, "B": 10, "C": 16, "E": 6, "F": 11, "G": 17, "K": 6}
NOT_YET = "not served yet: "


class Row(NamedTuple):
    """One kind."""

    id: str
    kind: str
    right: str
    tests: list[str]


def rows() -> list[Row]:
    found = []
    for line in (TESTS / "CASES.md").read_text().splitlines():
        if re.match(r"\| [A-Z]\d", line):
            id_, kind, right, tests = (cell.strip() for cell in line.strip("|").split("|"))
            assert re.fullmatch(r"(`[^`]+`( |$))*", tests), f"{id_}: {tests}"
            found.append(Row(id_, kind, right, re.findall("`([^`]+)`", tests)))
    return found


@cache
def names_in(path: str) -> frozenset[str]:
    """Names as pytest would give them: functions, methods, and machines that a class of tests is made of."""
    found = set()
    for node in ast.parse((TESTS / path).read_text()).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name.startswith("test"):
                found.add(name)
            case ast.ClassDef(name=name) if name.startswith("Test"):
                methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
                found |= {f"{name}::{each.name}" for each in methods if each.name.startswith("test")}
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute(attr="TestCase")):
                found.add(name)
    return frozenset(found)


def test_every_kind_has_one_row_in_order() -> None:
    expected = [f"{section}{number:02}" for section, count in COUNTS.items() for number in range(1, count + 1)]
    assert [row.id for row in rows()] == expected


def test_every_row_says_what_is_right_and_how_that_is_tested() -> None:
    for row in rows():
        assert row.kind, row.id
        assert row.right, row.id
        assert row.tests or row.right.startswith(NOT_YET), f"{row.id} has no test"
        assert max(Counter(row.tests).values(), default=1) == 1, f"{row.id} names a test twice"


def test_every_test_that_is_named_exists() -> None:
    named = {test for row in rows() for test in row.tests}
    assert len(named) > 50
    missing = []
    for test in sorted(named):
        path, _, name = test.partition("::")
        if not (TESTS / path).is_file() or name not in names_in(path):
            missing.append(test)
    assert missing == []


def test_a_test_that_does_not_exist_would_be_noticed() -> None:
    assert "test_every_kind_has_one_row_in_order" in names_in("unit/test_cases.py")
    assert "rows" not in names_in("unit/test_cases.py")
    assert "TestTraffic" in names_in("unit/worker/test_engine_property.py")
    assert "TestForward::test_a_repeated_call_writes_the_same" in names_in("unit/worker/model/test_hf.py")
