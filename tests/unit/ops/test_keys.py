"""`octavo keys` on a file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from click.testing import CliRunner

from kvstore.api_keys import LIMITS, KeyBook, digest_of, limits_of
from kvstore.key_file import KeyFile
from kvstore.tenants import Quota
from ops.keys import book_in, changed, command, limited

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result

    from ops.keys import Changes


def keys(path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(command, [*arguments, "--keys", str(path)])


def test_a_keys_life(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    made = keys(path, "add", "--tenant", "acme", "--name", "ci", "--concurrency", "3", "--tokens-per-minute", "1000")
    secret = made.stdout.strip()
    key_id = digest_of(secret)[:12]
    assert made.stdout.startswith("octavo-")
    assert made.stderr == f"octavo: key {key_id} of tenant acme; it is not kept, and can't be shown again:\n"
    assert secret not in path.read_text()
    boss = keys(path, "add", "--tenant", "house", "--operator").stdout.strip()
    told = json.loads(keys(path, "list", "--json").stdout)
    assert [(each["id"], each["tenant"], each["name"], each["operator"]) for each in told] == [
        (key_id, "acme", "ci", False),
        (digest_of(boss)[:12], "house", "", True),
    ]
    assert [(each["requests_per_minute"], each["tokens_per_minute"], each["concurrency"]) for each in told] == [
        (None, 1000, 3),
        (None, None, None),
    ]
    lines = keys(path, "list").stdout.splitlines()
    assert lines[1].split()[:4] == [key_id, "acme", "ci", "-"]
    assert lines[1].split()[-4:] == ["-", "1000", "3", "-"]
    assert keys(path, "limit", "acme", "--concurrency", "0").stderr == "octavo: acme: tokens per minute 1000\n"
    assert keys(path, "limit", "acme", "--tokens-per-minute", "0").stderr == "octavo: acme: no limits\n"
    assert keys(path, "revoke", key_id).stderr == f"octavo: revoked key {key_id} of tenant acme\n"
    assert keys(path, "revoke", boss).exit_code == 0  # by itself, where its id is not at hand
    assert json.loads(path.read_text()) == {}
    assert keys(path, "list").stdout == "There are no keys.\n"


def test_limits_are_the_tenants(tmp_path: Path) -> None:
    """A second key changes what it says, and nothing else."""
    path = tmp_path / "keys"
    keys(path, "add", "--tenant", "acme", "--concurrency", "3", "--requests-per-minute", "5")
    keys(path, "add", "--tenant", "acme", "--requests-per-minute", "6")
    assert json.loads(path.read_text())["tenant:acme"] == {
        "requests_per_minute": 6,
        "tokens_per_minute": None,
        "concurrency": 3,
        "max_priority": None,
    }
    assert keys(path, "limit", "acme", "--max-priority", "7").exit_code == 0
    assert json.loads(path.read_text())["tenant:acme"]["max_priority"] == 7
    assert "101 is not in the range 0<=x<=100" in keys(path, "limit", "acme", "--max-priority", "101").stderr


async def test_of_changes_at_once_none_undoes_another(tmp_path: Path) -> None:
    """What a tenant's limits were is read first; somebody else changes them before they are written."""

    class Busy(KeyFile):
        meddled = False

        async def read(self, known: str) -> tuple[str, KeyBook] | None:
            found = await super().read(known)
            if not self.meddled:
                self.meddled = True
                await self.put(limits_of("acme", Quota(concurrency=1)))
            return found

    store = Busy(tmp_path / "keys")
    await store.put(limits_of("acme", Quota(concurrency=9)))

    def made(book: KeyBook) -> Changes:
        return limits_of("acme", limited(book.quota("acme"), {**dict.fromkeys(LIMITS), "tokens_per_minute": 5}))

    assert (await changed(store, made)).quota("acme") == Quota(concurrency=1)
    _, book = await book_in(store)
    assert book.quota("acme") == Quota(tokens_per_minute=5, concurrency=1)


def test_what_can_not_be(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    for arguments, told in (
        (("add", "--tenant", "a/b"), "tenant 'a/b' is not 1 to 64 characters of [A-Za-z0-9._-]"),
        (("add", "--tenant", "a", "--name", "x" * 65), "--name has 65 characters, of 64 at most"),
        (("limit", "é"), "tenant 'é' is not 1 to 64 characters"),
        (("list",), "there is no file of API keys"),
        (("revoke", "abc"), "there is no file of API keys"),
    ):
        result = keys(path, *arguments)
        assert result.exit_code != 0
        assert told in result.stderr
    assert not path.exists()
    keys(path, "add", "--tenant", "a")
    assert "there is no such key; `octavo keys list` lists them" in keys(path, "revoke", "abc").stderr
    path.write_text("{")
    assert "damaged" in keys(path, "add", "--tenant", "a").stderr
