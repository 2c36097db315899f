"""`octavo batch` before it speaks to Redis, and what it prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import pytest
from click.testing import CliRunner

from kvstore.batches import Batch, BatchState, Progress, Settings
from ops.batch.command import cells, command, written
from ops.batch.worker import worker_name

if TYPE_CHECKING:
    from pathlib import Path

SHUT = "redis://127.0.0.1:1/0"


def test_a_file_with_wrong_lines_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "x"}\n{"id": "b"}\n')
    batches = tmp_path / "batches"
    ran = CliRunner().invoke(command, ["submit", str(file), "--batches", str(batches), "--redis", SHUT])
    assert ran.exit_code == 1
    assert ran.stderr.splitlines() == [
        "Error: the file is refused, and nothing of it was accepted",
        "line 2: id 'a' is that of line 1 too: each must be another",
        "line 3: prompt is not set: one of prompt, messages and token_ids is needed",
    ]
    assert list(batches.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["submit", "-"], "Missing option '--batches'"),
        (["submit", "-", "--batches", "x", "--in-flight", "0"], "0 is not in the range 1<=x<=256"),
        (["list", "--redis", "http://x"], "not a URL of a broker"),
        (["list", "--namespace", "a:b"], "namespace 'a:b' is not 1 to 64 characters"),
        (["results", "../x", "--batches", "."], "there is no batch '../x'"),
    ],
)
def test_what_is_refused(arguments: list[str], told: str) -> None:
    ran = CliRunner().invoke(command, arguments)
    assert ran.exit_code in (1, 2)
    assert told in ran.output


def test_a_folder_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    inside = str(tmp_path / "file" / "batches")
    ran = CliRunner().invoke(command, ["submit", "-", "--batches", inside, "--redis", SHUT], input="")
    assert ran.exit_code == 1
    assert "Not a directory" in ran.output


def test_a_line_of_the_table() -> None:
    progress = Progress(done=10, failed=2, completion_tokens=99, lines_per_s=2.0)
    batch = Batch("batch_x", BatchState.RUNNING, Settings(name="f", total=32), progress)
    assert cells(batch) == ("batch_x", "running", 10, 2, 32, 99, "2.0", "10.0 s", "f")
    assert batch.as_dict()["eta_s"] == 10.0
    ended = Batch("batch_x", BatchState.COMPLETED, Settings(total=32), progress)
    assert cells(ended)[7] == "-"


def test_results_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "out"
    written([b"a\n"], out)
    assert out.read_bytes() == b"a\n"

    def broken() -> object:
        yield b"b\n"
        raise click.ClickException("no")

    with pytest.raises(click.ClickException):
        written(broken(), out)  # type: ignore[arg-type]
    assert out.read_bytes() == b"a\n"
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_each_life_of_a_worker_has_a_name_of_its_own() -> None:
    assert worker_name() != worker_name()
