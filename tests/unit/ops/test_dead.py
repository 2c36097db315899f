"""`octavo dead`: lists, shows, retries and drops what too many workers died of."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from octavo.v1.fleet_pb2 import Dead, DropDeadRequest, ListDeadRequest, RetryDeadRequest
from ops.dead import command, moment
from tests.unit.ops.fleet_service import Operators, serving

POISON = Dead(
    request_id="p1",
    model="m",
    reason="3 workers died while they ran it",
    worker="w2",
    attempts=3,
    died_unix_ms=1_700_000_000_999,
    prompt_tokens=3,
    prompt_token_ids=[5, 6, 7],
    payload='{"request_id": "p1", "n": 2}',
)
DAMAGED = Dead(request_id="p2", model="m", reason="r", worker="w0", attempts=10, payload="{")


def run(*arguments: str) -> tuple[Result, Operators]:
    with serving(Operators(dead=(POISON, DAMAGED))) as operators:
        return CliRunner().invoke(command, [*arguments, "--target", operators.target]), operators


def test_they_are_listed_in_the_services_order() -> None:
    ran, operators = run("list")
    assert (ran.exit_code, [" ".join(line.split()) for line in ran.output.splitlines()]) == (
        0,
        [
            "id model worker attempts prompt died reason",
            "p1 m w2 3 3 2023-11-14 22:13:20 3 workers died while they ran it",
            "p2 m w0 10 0 1970-01-01 00:00:00 r",
        ],
    )
    assert operators.asked == [ListDeadRequest()]
    told = json.loads(run("list", "--json")[0].output)
    # Whatever a gateway says of what they were asked.
    assert [list(each) for each in told] == [
        ["request_id", "model", "reason", "worker", "attempts", "died_unix_ms", "prompt_tokens"]
    ] * 2
    assert [(each["request_id"], each["prompt_tokens"]) for each in told] == [("p1", 3), ("p2", 0)]


def test_none_are_a_sentence() -> None:
    with serving(Operators()) as operators:
        ran = CliRunner().invoke(command, ["list", "--target", operators.target])
    assert (ran.exit_code, ran.output) == (0, "There are no dead jobs.\n")


def test_one_is_shown_with_its_payload() -> None:
    ran, operators = run("show", "p1")
    assert (ran.exit_code, ran.output) == (
        0,
        "p1: 3 workers died while they ran it\n"
        "given up at 2023-11-14 22:13:20 on worker w2, in attempt 3\n"
        "model m, 3 prompt tokens\n"
        '{\n  "request_id": "p1",\n  "n": 2\n}\n',
    )
    assert operators.asked == [ListDeadRequest(request_id="p1")]
    told = json.loads(run("show", "p1", "--json")[0].output)
    assert list(told) == [field.name for field in Dead.DESCRIPTOR.fields]
    assert (told["prompt_token_ids"], told["died_unix_ms"]) == ([5, 6, 7], 1_700_000_000_999)
    # What is damaged is shown as it is.
    assert json.loads(run("show", "p2", "--json")[0].output)["payload"] == "{"


def test_one_is_run_again_under_a_new_id() -> None:
    ran, operators = run("retry", "p1")
    told = "runs again as p1.retry-1; `octavo attach p1.retry-1` shows its output\n"
    assert (ran.exit_code, ran.output) == (0, told)
    assert operators.asked == [RetryDeadRequest(request_id="p1")]
    assert json.loads(run("retry", "p1", "--json")[0].output) == {"request_id": "p1.retry-1"}


@pytest.mark.parametrize(("argument", "request_id", "dropped"), [("p2", "p2", 1), ("--all", "", 2)])
def test_one_or_all_are_forgotten(argument: str, request_id: str, dropped: int) -> None:
    ran, operators = run("drop", argument)
    assert (ran.exit_code, ran.output) == (0, f"dropped {dropped}\n")
    assert operators.asked == [DropDeadRequest(request_id=request_id)]
    assert json.loads(run("drop", argument, "--json")[0].output) == {"dropped": dropped}


def test_whom_to_show_must_be_said() -> None:
    ran, operators = run("show", "")
    assert (ran.exit_code, operators.asked) == (2, [])
    assert "must name a dead job; `octavo dead list` lists them" in ran.output


@pytest.mark.parametrize("arguments", [(), ("p1", "--all")])
def test_what_to_forget_must_be_said(arguments: tuple[str, ...]) -> None:
    ran, operators = run("drop", *arguments)
    assert (ran.exit_code, operators.asked) == (2, [])
    assert "give either an ID or --all" in ran.output


@pytest.mark.parametrize(
    ("verb", "told"),
    [
        ("show", "Error: there is no dead job 'x'\n"),
        ("drop", "Error: there is no dead job 'x'\n"),
        ("retry", "Error: NOT_FOUND: there is no dead job 'x'\n"),
    ],
)
def test_what_is_not_there_is_told(verb: str, told: str) -> None:
    ran, _ = run(verb, "x")
    assert (ran.exit_code, ran.output) == (1, told)


def test_what_is_no_time_is_shown_as_it_is() -> None:
    assert moment(0) == "1970-01-01 00:00:00"
    assert moment(2**64 - 1) == "18446744073709551615 ms"
