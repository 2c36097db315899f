"""API keys, as they are kept."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.api_keys import ApiKey, KeyBook, book_of, digest_of, entry_of, limits_of, new_key
from kvstore.errors import KeysDamaged, NoKeyFile
from kvstore.key_file import KeyFile
from kvstore.tenants import NO_QUOTA, Quota

if TYPE_CHECKING:
    from pathlib import Path

DIGEST = "ab" * 32
SECRET = "octavo-secret"
KEY = ApiKey(digest_of(SECRET), "acme", "ci", operator=True, created_ms=5)
QUOTA = Quota(requests_per_minute=3, concurrency=2)


def test_keys_are_random_and_only_their_hash_is_kept() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(re.fullmatch(r"octavo-[A-Za-z0-9_-]{43}", key) for key in keys)  # 43 x 6 bits
    assert digest_of("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert SECRET not in json.dumps(entry_of(KEY))


def test_what_was_written_is_read() -> None:
    book = book_of(json.loads(json.dumps(entry_of(KEY) | limits_of("acme", QUOTA))))
    assert book == KeyBook({KEY.digest: KEY}, {"acme": QUOTA})
    assert book.holder(SECRET) == KEY
    assert (book.quota("acme"), book.quota("other")) == (QUOTA, NO_QUOTA)


@pytest.mark.parametrize("key", ["", SECRET + " ", SECRET[:-1], KEY.digest, KEY.id, "x" * 257, "\udcff"])
def test_what_is_no_key_has_no_holder(key: str) -> None:
    assert book_of(entry_of(KEY)).holder(key) is None


def test_a_tenant_without_limits_is_not_written() -> None:
    assert limits_of("acme", NO_QUOTA) == {"tenant:acme": None}


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({DIGEST: "acme"}, f"'{DIGEST}' is no object"),
        ({"AB" * 32: {"tenant": "a"}}, f"'{'AB' * 32}' is neither a SHA-256 in hex nor tenant:NAME"),
        ({DIGEST[1:]: {"tenant": "a"}}, "is neither a SHA-256"),
        ({DIGEST: {}}, "the tenant of abababababab is None, not 1 to 64 characters"),
        ({DIGEST: {"tenant": "a/b"}}, "the tenant of abababababab is 'a/b'"),
        (
            {DIGEST: {"tenant": "a", "operator": "yes"}},
            "name, operator or created_ms of abababababab is of a wrong type",
        ),
        ({"tenant:a": {"concurrency": 0}}, "concurrency of 'tenant:a' is 0, not 1 to 1000000000000, or null"),
        ({"tenant:a": {"tokens_per_minute": "5"}}, "tokens_per_minute of 'tenant:a' is '5'"),
    ],
)
def test_what_is_wrong_is_told(entries: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        book_of(entries)


async def test_a_file_is_read_when_it_has_changed(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys")
    with pytest.raises(NoKeyFile, match=r"no file of API keys .*/keys: `octavo keys add --keys .*/keys --tenant NAME`"):
        await file.read("")
    await file.put(entry_of(KEY))
    found = await file.read("")
    assert found is not None
    version, book = found
    assert book == KeyBook({KEY.digest: KEY})
    assert await file.read(version) is None
    await file.put(limits_of("acme", QUOTA))
    found = await file.read(version)
    assert found is not None
    assert found[1] == KeyBook({KEY.digest: KEY}, {"acme": QUOTA})
    await file.put({KEY.digest: None})
    found = await file.read(found[0])
    assert found is not None
    assert found[1] == KeyBook({}, {"acme": QUOTA})


def test_a_file_is_for_its_owner_alone_unless_it_was_made_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    asyncio.run(KeyFile(path).put(entry_of(KEY)))
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    asyncio.run(KeyFile(path).put(limits_of("acme", QUOTA)))
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(each.name for each in tmp_path.iterdir()) == ["keys", "keys.lock"]


async def test_of_changes_at_once_none_is_lost(tmp_path: Path) -> None:
    keys = [ApiKey(digest_of(str(index)), "acme") for index in range(16)]
    await asyncio.gather(*(KeyFile(tmp_path / "keys").put(entry_of(key)) for key in keys))
    found = await KeyFile(tmp_path / "keys").read("")
    assert found is not None
    assert {*found[1].keys} == {key.digest for key in keys}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"x": {}}'])
async def test_a_damaged_file_is_told_and_not_written_over(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(KeysDamaged, match=r"the API keys in .*/keys are damaged: "):
        await KeyFile(path).read("")
    with pytest.raises(KeysDamaged):
        await KeyFile(path).put(entry_of(KEY))
    assert path.read_text() == text
