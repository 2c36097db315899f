from __future__ import annotations

import hashlib
import json
import os
import threading
from typing import TYPE_CHECKING

import pytest

from worker.model.cache import converted, file_digest
from worker.model.digest import joined_digest
from worker.model.errors import ModelDamaged, ModelError

if TYPE_CHECKING:
    from pathlib import Path


class TestFileDigest:
    """Reading a large file once is enough."""

    def test_it_is_sha256(self, tmp_path: Path) -> None:
        path = tmp_path / "weights"
        path.write_bytes(b"abc")
        assert file_digest(path, tmp_path / "cache") == hashlib.sha256(b"abc").hexdigest()

    def test_it_is_kept_while_size_and_time_stay(self, tmp_path: Path) -> None:
        path, cache = tmp_path / "weights", tmp_path / "cache"
        path.write_bytes(b"abc")
        first, state = file_digest(path, cache), path.stat()
        path.write_bytes(b"xyz")
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
        assert file_digest(path, cache) == first
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
        assert file_digest(path, cache) == hashlib.sha256(b"xyz").hexdigest()
        path.write_bytes(b"xyzz")
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
        assert file_digest(path, cache) == hashlib.sha256(b"xyzz").hexdigest()

    @pytest.mark.parametrize("record", [b"", b"{", b"[]", b'{"sha256": 1}'])
    def test_a_damaged_record_is_made_anew(self, record: bytes, tmp_path: Path) -> None:
        path, cache = tmp_path / "weights", tmp_path / "cache"
        path.write_bytes(b"abc")
        digest = file_digest(path, cache)
        (kept,) = (cache / "digests").iterdir()
        kept.write_bytes(record)
        assert file_digest(path, cache) == digest
        assert json.loads(kept.read_bytes())["sha256"] == digest

    def test_a_cache_that_cannot_be_written_only_costs_time(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = tmp_path / "weights"
        path.write_bytes(b"abc")
        assert file_digest(path, path / "no folder") == hashlib.sha256(b"abc").hexdigest()
        assert "can't keep the digest" in caplog.text


def test_joined_digests_do_not_run_into_each_other() -> None:
    assert joined_digest(["ab", "c"]) != joined_digest(["a", "bc"])
    assert joined_digest(["ab", "c"]) == joined_digest(iter(["ab", "c"]))


class TestConverted:
    """All or nothing, once."""

    def convert(self, target: Path) -> None:
        (target / "model").write_bytes(b"weights")

    def refuse(self, target: Path) -> None:
        raise AssertionError("converted again")

    def test_the_second_time_finds_it(self, tmp_path: Path) -> None:
        made = converted("key", tmp_path, self.convert)
        assert (made / "model").read_bytes() == b"weights"
        assert converted("key", tmp_path, self.refuse) == made

    def test_two_at_once_convert_once(self, tmp_path: Path) -> None:
        runs: list[Path] = []
        entered, go_on = threading.Event(), threading.Event()

        def slow(target: Path) -> None:
            runs.append(target)
            entered.set()
            assert go_on.wait(10)
            self.convert(target)

        results: list[Path] = []
        threads = [threading.Thread(target=lambda: results.append(converted("key", tmp_path, slow))) for _ in range(2)]
        threads[0].start()
        assert entered.wait(10)
        threads[1].start()
        go_on.set()
        for thread in threads:
            thread.join(10)
        assert len(runs) == 1
        assert results == [tmp_path / "models" / "key"] * 2

    def test_one_that_fails_leaves_nothing(self, tmp_path: Path) -> None:
        def fail(target: Path) -> None:
            self.convert(target)
            raise ModelDamaged("cut short")

        with pytest.raises(ModelDamaged, match="cut short"):
            converted("key", tmp_path, fail)
        assert [path.name for path in (tmp_path / "models").iterdir() if path.is_dir()] == []
        assert converted("key", tmp_path, self.convert).is_dir()

    def test_what_a_killed_one_left_is_not_used(self, tmp_path: Path) -> None:
        left = tmp_path / "models" / "key.new"
        left.mkdir(parents=True)
        (left / "half").write_bytes(b"")
        made = converted("key", tmp_path, self.convert)
        assert sorted(path.name for path in made.iterdir()) == ["manifest.json", "model"]

    @pytest.mark.parametrize("damage", ["altered", "cut", "gone", "no manifest", "torn manifest"])
    def test_damage_is_refused_with_advice(self, damage: str, tmp_path: Path) -> None:
        made = converted("key", tmp_path, self.convert)
        match damage:
            case "altered":
                (made / "model").write_bytes(b"wEights")
            case "cut":
                (made / "model").write_bytes(b"weigh")
            case "gone":
                (made / "model").unlink()
            case "no manifest":
                (made / "manifest.json").unlink()
            case "torn manifest":
                (made / "manifest.json").write_bytes((made / "manifest.json").read_bytes()[:-4])
        with pytest.raises(ModelDamaged, match=rf"delete {made} and start again"):
            converted("key", tmp_path, self.refuse)

    def test_a_cache_that_cannot_be_written_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(ModelError, match="can't keep the converted model in"):
            converted("key", tmp_path / "file", self.convert)
