"""Ages and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from ops import ledger
from ops.show import age, print_table, queue, workers
from tests.unit.ops.fleet_service import Operators, serving

if TYPE_CHECKING:
    import click


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0, "0"),
        (1, "1 ms"),
        (999, "999 ms"),
        (1000, "1.0 s"),
        (59_949, "59.9 s"),
        (60_000, "1 min 0 s"),
        (200_900, "3 min 20 s"),
    ],
)
def test_age(milliseconds: int, text: str) -> None:
    assert age(milliseconds) == text


def test_a_table_in_a_pipe_is_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("name", "n"), [("x" * 200, 5), ("y", 10)])
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["name", "n"],
        ["x" * 200, "5"],
        ["y", "10"],
    ]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (queue, "There are no queues: no worker is alive, and none has left any jobs."),
        (workers, "No worker is alive; octavo worker starts one."),
    ],
)
def test_where_nothing_is_to_be_shown_a_sentence_says_so(command: click.Command, told: str) -> None:
    with serving(Operators()) as operators:
        ran, json = (
            CliRunner().invoke(command, [*arguments, "--target", operators.target]) for arguments in ((), ("--json",))
        )
    assert (ran.exit_code, ran.output, json.output) == (0, f"{told}\n", "[]\n")


@pytest.mark.parametrize("command", [queue, workers, ledger.command])
def test_what_is_no_url_is_told_in_a_line(command: click.Command) -> None:
    ran = CliRunner().invoke(command, ["--redis", "nonsense:secret"])
    told = "Error: not a URL of a broker: redis://, rediss:// or unix://, host, port and database\n"
    assert (ran.exit_code, ran.output) == (1, told)
