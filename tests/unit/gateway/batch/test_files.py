"""Files of clients, and those that batches leave."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gateway.batch.files import INPUT, Files, FileUnknown, output_id

BATCH = "batch_" + "0" * 24


def kept(files: Files, data: bytes, created_s: int = 5) -> str:
    new = files.new()
    new.write(data)
    return new.keep("mine.jsonl", INPUT, created_s).id


def result(id_: str, status: int) -> bytes:
    body = {"usage": {}} if status == 200 else {"error": {}}
    told = {"id": "r", "custom_id": id_, "response": {"status_code": status, "body": body}, "error": None}
    return json.dumps(told).encode() + b"\n"


def test_a_file_is_there_once_it_is_kept_and_not_any_more_once_it_is_deleted(tmp_path: Path) -> None:
    files = Files(tmp_path / "files")
    assert files.all() == []
    new = files.new()
    new.write(b"ab")
    new.write(b"c")
    assert files.all() == []
    told = new.keep("x" * 300, INPUT, 7)
    assert (told.filename, told.purpose, told.created_s, told.bytes) == ("x" * 255, "batch", 7, 3)
    assert files.get(told.id) == told
    assert files.content(told.id).read_bytes() == b"abc"
    files.delete(told.id)
    assert files.all() == []
    for call in (files.get, files.content, files.delete):
        with pytest.raises(FileUnknown, match=f"there is no file '{told.id}'"):
            call(told.id)


def test_what_is_dropped_leaves_nothing(tmp_path: Path) -> None:
    new = Files(tmp_path).new()
    new.write(b"x")
    new.drop()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "..", "../x", "file-", "file-" + "0" * 23 + "/", ".new-0"])
def test_no_other_path_is_a_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileUnknown):
        Files(tmp_path).get(name)


def test_the_latest_comes_first(tmp_path: Path) -> None:
    files = Files(tmp_path)
    ids = [kept(files, b"ab", created_s) for created_s in (2, 9, 4)]
    assert [each.id for each in files.all()] == [ids[1], ids[2], ids[0]]
    assert (files.usage(), Files(tmp_path / "none").usage()) == ((3, 6), (0, 0))
    assert len(set(ids)) == 3


def test_results_become_two_files_and_the_same_ones_again(tmp_path: Path) -> None:
    files, path = Files(tmp_path / "files"), tmp_path / "results.jsonl"
    good, bad = [result("a", 200), result("c", 200)], [result("b", 400)]
    path.write_bytes(good[0] + bad[0] + good[1])
    for _ in range(2):
        files.publish(BATCH, path, 7)
        answers, failures = (output_id(BATCH, failed=failed) for failed in (False, True))
        assert files.content(answers).read_bytes() == b"".join(good)
        assert files.content(failures).read_bytes() == b"".join(bad)
        assert {each.filename for each in files.all()} == {f"{BATCH}_output.jsonl", f"{BATCH}_error.jsonl"}
        assert {each.purpose for each in files.all()} == {"batch_output"}
    assert sorted(each.name for each in (tmp_path / "files").iterdir()) == sorted((answers, failures))


def test_there_is_no_file_of_failures_where_there_are_none(tmp_path: Path) -> None:
    files, path = Files(tmp_path / "files"), tmp_path / "results.jsonl"
    path.write_bytes(result("a", 200))
    files.publish(BATCH, path, 7)
    assert [each.id for each in files.all()] == [output_id(BATCH, failed=False)]


def test_old_files_and_uploads_of_dead_gateways_are_forgotten(tmp_path: Path) -> None:
    files = Files(tmp_path)
    kept(files, b"old", 5)
    young = kept(files, b"young", 2**40)
    dead, alive = files.new(), files.new()
    dead.write(b"x")
    dead._file.close()  # as a kill does
    left = Path(dead._file.name)
    os.utime(left, (5, 5))
    assert files.forget(3600.0) == 1
    assert [each.id for each in files.all()] == [young]
    assert not left.exists()
    assert alive.keep("y", INPUT, 5).bytes == 0
