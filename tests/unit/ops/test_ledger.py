"""`octavo ledger`: what it prints, and what it says when something is missing."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from octavo.v1.fleet_pb2 import LedgerResponse
from ops.ledger import command, missing_of
from tests.unit.ops.fleet_service import Operators, serving

HOLDS = LedgerResponse(accepted=100, finished=60, failed=5, cancelled=10, expired=4, dead=1, in_flight=20)
NOBODY = "127.0.0.1:1"


def run(ledger: LedgerResponse | None, *arguments: str) -> Result:
    with serving(Operators(ledger=ledger)) as operators:
        return CliRunner().invoke(command, ["--target", operators.target, *arguments])


def test_what_adds_up_is_shown_line_by_line() -> None:
    ran = run(HOLDS)
    assert (ran.exit_code, [line.split() for line in ran.stdout.splitlines()]) == (
        0,
        [
            ["requests", "count"],
            ["accepted", "100"],
            ["finished", "60"],
            ["failed", "5"],
            ["cancelled", "10"],
            ["expired", "4"],
            ["dead", "1"],
            ["in", "flight", "20"],
        ],
    )


def test_json_is_the_services_answer_and_what_is_missing() -> None:
    ran = run(HOLDS, "--json")
    assert ran.exit_code == 0
    assert json.loads(ran.stdout) == {
        "accepted": 100,
        "finished": 60,
        "failed": 5,
        "cancelled": 10,
        "expired": 4,
        "dead": 1,
        "in_flight": 20,
        "missing": 0,
    }


@pytest.mark.parametrize(("accepted", "missing"), [(103, 3), (98, -2)])
def test_what_does_not_add_up_is_a_failure(accepted: int, missing: int) -> None:
    ledger = LedgerResponse()
    ledger.CopyFrom(HOLDS)
    ledger.accepted = accepted
    ran = run(ledger)
    assert (ran.exit_code, ran.stderr) == (1, f"Error: {accepted} were accepted, and 100 are accounted for\n")
    assert "in flight" in ran.stdout
    told = run(ledger, "--json")
    assert (told.exit_code, json.loads(told.stdout)["missing"]) == (1, missing)


def test_nothing_is_missing_of_nothing() -> None:
    assert missing_of(LedgerResponse()) == 0


def test_a_broker_that_does_not_answer_is_told() -> None:
    ran = run(None)
    assert (ran.exit_code, ran.output) == (1, "Error: UNAVAILABLE: the broker does not answer; try again\n")


@pytest.mark.parametrize("gone", [True, False])
def test_of_several_gateways_the_next_one_is_asked_where_one_is_unavailable(gone: bool) -> None:
    with serving(Operators(ledger=None)) as first, serving(Operators(ledger=HOLDS)) as second:
        ran = CliRunner().invoke(command, ["--target", f"{NOBODY if gone else first.target},{second.target}"])
    assert ran.exit_code == 0
    assert (len(first.asked), len(second.asked)) == (0 if gone else 1, 1)


def test_what_is_the_matter_with_all_is_told_by_the_last() -> None:
    with serving(Operators(ledger=None)) as last:
        ran = CliRunner().invoke(command, ["--target", f"{NOBODY},{last.target}"])
    assert (ran.exit_code, ran.output) == (1, "Error: UNAVAILABLE: the broker does not answer; try again\n")
