"""The file of results: durable, whole lines, none twice."""

from __future__ import annotations

import errno
import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from gateway.batch.journal import Journal, Locked, results, tally

if TYPE_CHECKING:
    from pathlib import Path


def result(id_: str, tokens: int = 2, **fields: Any) -> dict[str, Any]:
    return {"id": id_, "text": "é", "usage": {"prompt_tokens": 3, "completion_tokens": tokens}, **fields}


def line(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def failure(id_: str) -> dict[str, Any]:
    return {"id": id_, "error": {"message": "no"}}


def openai(id_: str, status: int) -> dict[str, Any]:
    usage = {"usage": {"prompt_tokens": 5, "completion_tokens": 7}}
    body = usage if status == 200 else {"error": {"message": "no"}}
    return {"id": "r", "custom_id": id_, "response": {"status_code": status, "body": body}, "error": None}


def test_what_results_say() -> None:
    told = tally(map(line, [result("a"), failure("b"), openai("c", 200), openai("d", 400)]))
    assert told.ids == {"a", "b", "c", "d"}
    assert (told.done, told.failed, told.prompt_tokens, told.completion_tokens) == (2, 2, 8, 9)


@pytest.mark.parametrize(
    "rest",
    [
        line(result("b"))[:-1],
        b'{"id": "b", "te',
        b"\0" * 100,
        b"\0" * 100 + b"\n",
        b"[]\n",
        b'{"custom_id": "b"}\n',
        line(result("a")),
    ],
)
def test_what_is_no_result_is_cut_off_with_all_behind_it(tmp_path: Path, rest: bytes) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(line(result("a")) + rest + line(result("c")))
    journal = Journal(path)
    assert journal.tally.ids == {"a"}
    assert journal.cut == len(rest) + len(line(result("c")))
    journal.append(result("d"))
    journal.close()
    assert [json.loads(each) for each in results(path)] == [result("a"), result("d")]


def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    for id_ in "ab":
        journal = Journal(path)
        journal.append(result(id_))
        journal.close()
    journal = Journal(path)
    assert (journal.tally.ids, journal.tally.completion_tokens, journal.cut) == ({"a", "b"}, 4, 0)
    journal.close()


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    first = Journal(path)
    with pytest.raises(Locked):
        Journal(path)
    first.append(result("a"))
    first.close()
    Journal(path).close()


def test_a_line_has_one_result(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "results.jsonl")
    journal.append(result("a"))
    with pytest.raises(ValueError, match="line 'a' has two results"):
        journal.append(result("a"))
    journal.close()
    assert len(list(results(tmp_path / "results.jsonl"))) == 1


def test_a_disk_that_is_full_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, write, room = Journal(tmp_path / "results.jsonl"), os.write, [100]

    def limited(file: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "no space left")
        written = write(file, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", limited)
    journal.append(result("a"))
    with pytest.raises(OSError, match="no space left"):
        journal.append(result("b"))
    room[0] = 1000
    journal.append(result("b"))
    journal.close()
    assert [json.loads(each)["id"] for each in results(tmp_path / "results.jsonl")] == ["a", "b"]


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    assert list(results(path)) == []
    path.write_bytes(line(result("a")) + b'{"id"')
    assert list(results(path)) == [line(result("a"))]
