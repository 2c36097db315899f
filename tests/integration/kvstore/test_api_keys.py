"""API keys in the broker, and changes of them at once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvstore.api_keys import ApiKey, KeyBook, RedisKeys, digest_of, entry_of, limits_of
from kvstore.key_file import KeyFile
from kvstore.tenants import Quota

from .conftest import Stage, on_both_servers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from kvstore.api_keys import KeyStore

OLD, NEW = (ApiKey(digest_of(each), "acme") for each in ("old", "new"))
QUOTA = Quota(concurrency=2)


@pytest.fixture(autouse=True)
async def nothing_left(stage: Stage) -> AsyncIterator[None]:
    yield
    await stage.broker.call("DEL", stage.broker.keys.api_keys)


async def book_of(store: KeyStore) -> tuple[str, KeyBook]:
    found = await store.read("")
    assert found is not None
    return found


@on_both_servers
async def test_keys_of_a_server_that_lost_its_data_are_read_anew(stage: Stage) -> None:
    """However many changes there are then: gateways that know as many would let the old ones in, and no others."""
    store = RedisKeys(stage.broker)
    await store.put(entry_of(OLD))
    version, book = await book_of(store)
    assert book.holder("old") == OLD
    await stage.broker.call("DEL", stage.broker.keys.api_keys)
    await store.put(entry_of(NEW))
    found = await store.read(version)
    assert found is not None
    assert found[1] == KeyBook({NEW.digest: NEW})


@on_both_servers
@pytest.mark.parametrize("where", ["file", "redis"])
async def test_what_was_made_from_what_holds_no_more_changes_nothing(stage: Stage, tmp_path: Path, where: str) -> None:
    store: KeyStore = KeyFile(tmp_path / "keys") if where == "file" else RedisKeys(stage.broker)
    none = "" if where == "file" else "0"
    assert await store.put(entry_of(OLD), none)
    assert not await store.put(entry_of(NEW), none)
    version, book = await book_of(store)
    assert book == KeyBook({OLD.digest: OLD})
    assert await store.put(limits_of("acme", QUOTA), version)
    assert not await store.put({OLD.digest: None}, version)
    assert (await book_of(store))[1] == KeyBook({OLD.digest: OLD}, {"acme": QUOTA})


async def test_a_change_that_is_repeated_after_a_lost_reply_was_made_once(stage: Stage) -> None:
    name = stage.broker.keys.api_keys
    change = ["v1", "0", OLD.digest, json.dumps(entry_of(OLD)[OLD.digest])]
    assert [await stage.broker.script("keys", [name], change) for _ in range(2)] == [1, 1]
    assert await stage.broker.call("HGET", name, "version") == b"v1"
