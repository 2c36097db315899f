"""What every script must say about itself."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from kvstore.scripts import SHARED, load_scripts

FOLDER = resources.files("kvstore") / "lua"
NAMES = sorted(load_scripts())


@pytest.mark.parametrize("name", NAMES)
def test_flags_first_then_what_it_is(name: str) -> None:
    """Only submit may be refused by a full server: what it would start is not running yet."""
    source = (FOLDER / f"{name}.lua").read_text(encoding="utf-8")
    flags, first = source.split("\n")[:2]
    others = "#!lua flags=allow-oom,no-writes" if name == "ledger" else "#!lua flags=allow-oom"
    assert flags == ("#!lua" if name == "submit" else others)
    assert first.startswith("-- ")
    head = re.match(r"#!lua.*\n((?:--.*\n)+)", source)
    assert head is not None
    assert all(word in head[1] for word in ("-- KEYS 1 ", "-- ARGV 1 "))
    assert re.search(r"Races? closed:|for the flag alone", head[1])


@pytest.mark.parametrize("name", NAMES)
def test_shared_helpers_come_after_the_flags(name: str) -> None:
    source = load_scripts()[name].source
    assert source.startswith("#!lua")
    assert source.count("#!lua") == 1
    assert "local function end_job(" in source


@pytest.mark.parametrize("name", [*NAMES, *(name.removesuffix(".lua") for name in SHARED)])
def test_nothing_newer_than_the_floor_and_nothing_slow(name: str) -> None:
    source = (FOLDER / f"{name}.lua").read_text(encoding="utf-8")
    commands = set(re.findall(r"redis\.p?call\('(\w+)'", source))
    assert not commands & {"KEYS", "SCAN", "XTRIM", "XACKDEL", "XDELEX", "HPEXPIRE", "HSETEX", "FLUSHALL", "FLUSHDB"}
    # Nothing that is work is bounded by dropping it.
    bounded = {
        "submit": ["  local route = redis.pcall('XADD', routes, 'MAXLEN', '~', ARGV[15], '*', 'd', ARGV[14])"],
    }
    assert re.findall(r".*MAXLEN.*", source) == bounded.get(name, [])
