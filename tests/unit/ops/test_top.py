"""`octavo top`: where it reads, what it does when a source is away, and what scripts get."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import click
import pytest
from click.testing import CliRunner

from kvstore.errors import BrokerUnreachable
from octavo.v1.fleet_pb2 import LedgerResponse, Worker
from ops import top
from ops.answer import plain
from ops.top import Looks, heading, noted, settled, watch
from ops.top_figures import Snapshot
from tests.unit.ops.fleet_service import Operators, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

AWAY = BrokerUnreachable("broker at redis://there is away")


def snapshot(at: float = 100.0, output_tokens: int = 0) -> Snapshot:
    told = Worker(
        id="w0", incarnation="i", state="ready", heartbeat_unix_ms=int(1000 * at), output_tokens=output_tokens
    )
    return Snapshot([plain(told)], [], plain(LedgerResponse()))


class Scripted:
    """A source that gives one thing after the other, the last one again and again."""

    def __init__(self, name: str, *script: Snapshot | Exception) -> None:
        self.name = name
        self.closed = 0
        self._script: Iterator[Snapshot | Exception] = iter([*script[:-1], *[script[-1]] * 99])

    async def read(self) -> Snapshot:
        found = next(self._script)
        if isinstance(found, Exception):
            raise found
        return found

    async def close(self) -> None:
        self.closed += 1


async def test_a_source_that_goes_away_is_told_of_and_the_next_one_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [50.0]
    monkeypatch.setattr(top.time, "monotonic", lambda: clock[0])
    a, b = Scripted("a", snapshot(), AWAY), Scripted("b", snapshot(101.0, 20), AWAY)
    looks = Looks([a, b])
    assert (heading(looks, 50.0), noted(looks, 50.0)) == ("octavo top: a", "")
    await looks.look()
    assert (heading(looks, 50.0), noted(looks, 50.0)) == ("octavo top: a, 1 worker", "")
    clock[0] = 60.0
    await looks.look()
    trouble = "a: broker at redis://there is away; asking b"
    assert (heading(looks, 61.0), noted(looks, 61.0)) == ("octavo top: b, 1 worker, as of 11 s ago", trouble)
    assert (a.closed, looks.tried_all) == (1, False)
    clock[0] = 62.0
    await looks.look()
    # What was known goes on at the next source; what happened stays on the screen for a while.
    assert heading(looks, 62.0) == "octavo top: b, 1 worker"
    assert (noted(looks, 89.9), noted(looks, 90.0)) == (trouble, "")
    assert looks.view is not None
    assert looks.view.total.output_tok_s == 20.0
    for tried in (False, True):
        await looks.look()
        assert looks.tried_all is tried
    assert noted(looks, 999.0).startswith("a: ")


async def test_who_has_no_other_source_tries_again() -> None:
    looks = Looks([Scripted("a", AWAY, snapshot())])
    await looks.look()
    assert (looks.trouble, looks.tried_all, looks.view) == (
        "a: broker at redis://there is away; trying again",
        True,
        None,
    )
    await looks.look()
    assert (looks.tried_all, looks.view is not None) == (False, True)


async def test_it_draws_after_each_look_and_leaves_nothing_open() -> None:
    sources = [Scripted("a", snapshot(), AWAY), Scripted("b", snapshot())]
    drawn: list[str] = []
    enough = asyncio.Event()

    def draw(looks: Looks) -> None:
        drawn.append(looks.source.name)
        if len(drawn) == 4:
            enough.set()

    watching = asyncio.create_task(watch(Looks(sources), 0.001, draw))
    await asyncio.wait_for(enough.wait(), 10)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert drawn[:4] == ["a", "b", "b", "b"]
    assert [source.closed for source in sources] == [2, 1]


async def test_once_waits_for_second_heartbeats_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "LOOK_S", 0.001)
    looks = await settled([Scripted("a", snapshot(), snapshot(), snapshot(101.0, 7))])
    assert looks.view is not None
    assert looks.view.total.output_tok_s == 7.0
    monkeypatch.setattr(top, "SETTLE_S", 0.01)
    looks = await settled([Scripted("a", snapshot())])
    assert looks.view is not None
    assert looks.view.total.output_tok_s is None


async def test_once_asks_every_source_and_then_gives_up() -> None:
    assert (await settled([Scripted("a", AWAY), Scripted("b", Snapshot([], [], plain(LedgerResponse())))])).view
    with pytest.raises(click.ClickException, match=r"^b: broker at redis://there is away$"):
        await settled([Scripted("a", AWAY), Scripted("b", AWAY)])


def test_what_is_no_terminal_gets_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "SETTLE_S", 0.01)
    told = Worker(id="w0", incarnation="i", state="ready", max_running=8, blocks_free=4)
    with serving(Operators(ledger=LedgerResponse(accepted=1, finished=1), workers=(told,))) as operators:
        asked = ["--target", f"127.0.0.1:1,{operators.target}"]
        plainly = CliRunner().invoke(top.command, asked)
        as_json = CliRunner().invoke(top.command, [*asked, "--json"])
    assert plainly.exit_code == as_json.exit_code == 0
    lines = plainly.output.splitlines()
    assert lines[0] == operators.target
    assert [line.split()[:3] for line in lines[1:4]] == [
        ["worker", "state", "run"],
        ["w0", "ready", "0/8"],
        ["total", "0/8", "0"],
    ]
    assert lines[4] == "ledger: accepted 1, finished 1, adds up"
    shown = json.loads(as_json.output)
    assert shown["ledger"]["missing"] == 0
    assert [(each["worker"], each["blocks_total"], each["hit_rate"]) for each in shown["workers"]] == [("w0", 4, None)]
    assert shown["total"]["worker"] == "total"


def test_nobody_answers() -> None:
    ran = CliRunner().invoke(top.command, ["--target", "127.0.0.1:1"])
    assert ran.exit_code == 1
    assert ran.output.startswith("Error: 127.0.0.1:1: UNAVAILABLE: nothing answers there; is `octavo up` running")


def test_what_is_no_url_is_told_in_a_line() -> None:
    ran = CliRunner().invoke(top.command, ["--redis", "nonsense:secret"])
    told = "Error: not a URL of a broker: redis://, rediss:// or unix://, host, port and database\n"
    assert (ran.exit_code, ran.output) == (1, told)
