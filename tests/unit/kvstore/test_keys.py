"""Names in the broker."""

from __future__ import annotations

import pytest

from kvstore.keys import Keys


def test_names() -> None:
    keys = Keys("ns")
    names = {
        keys.workers: "{octavo:ns}:workers",
        keys.job("r"): "{octavo:ns}:job:r",
        keys.jobs("w"): "{octavo:ns}:jobs:w",
        keys.log("r"): "{octavo:ns}:log:r",
        keys.worker("w"): "{octavo:ns}:worker:w",
        keys.left("w", "i"): "{octavo:ns}:left:w:i",
        keys.suspect("w"): "{octavo:ns}:suspect:w",
        keys.orphaned("w"): "{octavo:ns}:orphaned:w",
        keys.ledger: "{octavo:ns}:ledger",
        keys.dead: "{octavo:ns}:dead:jobs",
        keys.dead_times: "{octavo:ns}:dead:times",
        keys.live("t"): "{octavo:ns}:live:t",
        keys.quota("t"): "{octavo:ns}:quota:t",
        keys.api_keys: "{octavo:ns}:keys",
        keys.load("w", "i"): "{octavo:ns}:load:w:i",
        keys.held("w", "i"): "{octavo:ns}:held:w:i",
        keys.held_replacement("w", "i", "r"): "{octavo:ns}:held:w:i:r",
        keys.routes: "{octavo:ns}:routes",
        keys.gateway("i"): "{octavo:ns}:gateway:i",
        keys.channel("i"): "{octavo:ns}:channel:i",
        keys.help("f"): "{octavo:ns}:help:f",
        keys.model("f"): "{octavo:ns}:model:f",
        keys.page("f", "ab"): "{octavo:ns}:page:f:ab",
        keys.pages: "{octavo:ns}:pages",
        keys.page_sizes: "{octavo:ns}:pages:sizes",
        keys.batch("b"): "{octavo:ns}:batch:b",
        keys.batches: "{octavo:ns}:batches",
        keys.open_batches: "{octavo:ns}:batches:open",
        keys.chore("c"): "{octavo:ns}:batches:chore:c",
        keys.batch_queue: "{octavo:ns}:batches:queue",
    }
    assert all(name == expected for name, expected in names.items())
    assert all(name.startswith(keys.prefix) for name in names)


def test_types_are_those_of_the_table() -> None:
    keys = Keys("ns")
    types = {
        "hash": [
            keys.job("r"),
            keys.worker("workers"),
            keys.orphaned("w"),
            keys.ledger,
            keys.dead,
            keys.load("w", "i"),
        ],
        "stream": [keys.jobs("job"), keys.log("r"), keys.routes],
        "zset": [keys.workers, keys.dead_times, keys.pages],
        "set": [keys.held("w", "i"), keys.held_replacement("w", "i", "r")],
        "string": [keys.left("w", "i"), keys.suspect("w"), keys.gateway("i"), keys.page("f", "ab")],
    }
    types["hash"] += [keys.model("f"), keys.page_sizes]
    for kind, names in types.items():
        assert [keys.type_of(name) for name in names] == [kind] * len(names)
    assert keys.among(["HGET", keys.ledger, "a", b"b", 1, keys.job("r")]) == [keys.ledger, keys.job("r")]


@pytest.mark.parametrize("namespace", ["", "a:b", "a}b", "{a", "a b", "ä", "x" * 65, "a\n"])
def test_namespaces_that_could_meet_others(namespace: str) -> None:
    with pytest.raises(ValueError, match="namespace"):
        Keys(namespace)
