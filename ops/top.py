"""`octavo top`: a fleet as it works, in the terminal, from a gateway or straight from Redis."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Final, Protocol

import click
import grpc.aio
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from kvstore.client import BrokerConfig, connect
from kvstore.errors import KvError
from kvstore.jobs import Jobs
from kvstore.ranges import Finite
from kvstore.registry import Registry
from kvstore.translation import shown_url
from ops.answer import plain
from ops.client import Client, describe
from ops.config import option
from ops.console import Interrupts, emit_json
from ops.reach import Target, reaching
from ops.show import UNCUT
from ops.tasks import first_of
from ops.top_figures import Snapshot, follow, view
from ops.top_lines import lines

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.client import Broker
    from ops.top_figures import Beats, View

READ_S: Final = 3.0
"""After so long a gateway that does not answer is taken to be away."""
NOTE_S: Final = 30.0
"""How long it stays on the screen that one went away."""
SETTLE_S: Final = 2.5
"""How long `--once` waits for second heartbeats, without which there are no rates."""
LOOK_S: Final = 0.2


class Source(Protocol):
    """Where snapshots come from. ``read`` raises AioRpcError, KvError or TimeoutError; then ``close`` it: the next
    read connects anew."""

    name: str

    async def read(self) -> Snapshot: ...
    async def close(self) -> None: ...


class Gateway:
    """A gateway's Fleet service."""

    def __init__(self, target: Target) -> None:
        self.name = target.text
        self._target = target
        self._client: Client | None = None

    async def read(self) -> Snapshot:
        # A new channel after each failure: an old one waits longer and longer before it looks for its server again.
        client = self._client = self._client or Client(self._target)
        async with asyncio.timeout(READ_S):
            workers, queues, ledger = await asyncio.gather(client.workers(), client.queues(), client.ledger())
        return Snapshot([plain(each) for each in workers], [plain(each) for each in queues], plain(ledger))

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.__aexit__(None, None, None)


class Redis:
    """The broker itself. What only gateways know, their circuits, is not there."""

    def __init__(self, url: str, namespace: str) -> None:
        self.name = "Redis"  # until the URL has proved to be one
        self._config = BrokerConfig(url, namespace, connect_patience_s=READ_S)
        self._broker: Broker | None = None

    async def read(self) -> Snapshot:
        from gateway.fleet import ledger_message, queue_message, worker_message

        if self._broker is None:
            try:
                self._broker = await connect(self._config)
            except ValueError as error:  # no URL, or no namespace: no later try will do
                raise click.ClickException(str(error)) from error
            self.name = shown_url(self._config.url)
        jobs, registry = Jobs(self._broker), Registry(self._broker)
        workers, queues, ledger = await asyncio.gather(registry.workers(), jobs.queues(), jobs.ledger())
        return Snapshot(
            [plain(worker_message(each)) for each in workers],
            [plain(queue_message(each)) for each in queues],
            plain(ledger_message(ledger)),
        )

    async def close(self) -> None:
        broker, self._broker = self._broker, None
        if broker is not None:
            await broker.close()


class Looks:
    """Reads from the first source that answers, and goes on at the next one when it ceases to."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._at = 0
        self._beats: dict[str, Beats] = {}
        self.view: View | None = None
        """As last read; None: nothing was read yet."""
        self.read_at = 0.0
        self.trouble = ""
        """Why the last failure failed."""
        self.failed_at = -NOTE_S
        self.in_vain = 0
        """Failures since something was read."""

    @property
    def source(self) -> Source:
        return self._sources[self._at]

    @property
    def settled(self) -> bool:
        """Whether all live workers have beaten twice, so that all rates are known."""
        return all(each.before is not None for each in self._beats.values())

    @property
    def tried_all(self) -> bool:
        """Whether none of the sources has answered since something was read last."""
        return self.in_vain > 0 and self.in_vain % len(self._sources) == 0

    async def look(self) -> None:
        """Reads once. A failure is told in ``trouble``; the next look is at the next source."""
        source = self.source
        try:
            snapshot = await source.read()
        except (grpc.aio.AioRpcError, KvError, TimeoutError) as error:
            await source.close()
            self._at = (self._at + 1) % len(self._sources)
            self.in_vain += 1
            then = "trying again" if self.source is source else f"asking {self.source.name}"
            self.trouble, self.failed_at = f"{source.name}: {reason(error)}; {then}", time.monotonic()
            return
        self._beats = follow(self._beats, snapshot)
        self.view, self.read_at, self.in_vain = view(snapshot, self._beats), time.monotonic(), 0

    async def close(self) -> None:
        for source in self._sources:
            await source.close()


@click.command("top")
@reaching("HOST:PORT of a gateway; of several, with commas between.")
@click.option("--redis", default="", help="Ask Redis itself at this URL: works without any gateway.")
@option("--namespace", default="default", help="With --redis: the fleet's name within it.")
@click.option("--interval", type=Finite(min=0.1), default=1.0, show_default=True, help="Seconds between two looks.")
@click.option("--once", is_flag=True, help="Print once and end; so it is where the output is no terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, once.")
def command(target: Target, redis: str, namespace: str, interval: float, once: bool, as_json: bool) -> None:
    """Show the fleet as it works, until Ctrl-C.

    run: sequences that run, and how many may. wait: sequences in the worker that wait. queue: jobs in its stream, not
    yet taken + taken. pool: blocks in use + cached. hits: of the prompt tokens looked up in the prefix cache. tok/s:
    output. computed/s: all tokens that go through the model. step: mean time of a step. busy: share of the time in
    steps. beat: age of the last heartbeat. Rates are of the time between a worker's last two heartbeats.
    """
    sources: list[Source] = (
        [Redis(redis, namespace)] if redis else [Gateway(Target(each, target.access)) for each in target.addresses]
    )
    if once or as_json or not sys.stdout.isatty() or Console().is_dumb_terminal:
        shown = asyncio.run(settled(sources))
        if as_json:
            emit_json(asdict(shown.view) if shown.view is not None else None)
        else:
            told = lines(shown.source.name, "", shown.view, width=UNCUT, height=UNCUT)
            click.echo("\n".join(line.text for line in told))
        return
    asyncio.run(until_interrupted(sources, interval))


async def settled(sources: Sequence[Source]) -> Looks:
    """A view with all rates, as far as workers tell them in time. Raises ClickException: nobody answers."""
    looks, deadline = Looks(sources), time.monotonic() + SETTLE_S
    try:
        while True:
            await looks.look()
            if looks.tried_all:
                raise click.ClickException(looks.trouble.rpartition("; ")[0])
            if looks.view is not None and (looks.settled or time.monotonic() > deadline):
                return looks
            await asyncio.sleep(0 if looks.in_vain else LOOK_S)
    finally:
        await looks.close()


async def until_interrupted(sources: Sequence[Source], interval: float) -> None:
    """The screen, until Ctrl-C or SIGTERM."""
    interrupts = Interrupts().install()
    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:

        def draw(looks: Looks) -> None:
            now = time.monotonic()
            width, height = console.size
            told = lines(heading(looks, now), noted(looks, now), looks.view, width=width, height=height)
            live.update(Group(*(Text(line.text, line.style, no_wrap=True) for line in told)), refresh=True)

        await first_of(watch(Looks(sources), interval, draw), interrupts.first.wait())


async def watch(looks: Looks, interval: float, draw: Callable[[Looks], None]) -> None:
    """Looks and draws, until cancelled."""
    try:
        while True:
            await looks.look()
            draw(looks)
            if not looks.in_vain or looks.tried_all:
                await asyncio.sleep(interval)
    finally:
        await looks.close()


def heading(looks: Looks, now: float) -> str:
    """Where the view is from, and how old it is if it is not new."""
    if looks.view is None:
        return f"octavo top: {looks.source.name}"
    live = sum(each.heartbeat_age_s is not None for each in looks.view.workers)
    old = f", as of {now - looks.read_at:.0f} s ago" if looks.in_vain else ""
    return f"octavo top: {looks.source.name}, {live} worker{'' if live == 1 else 's'}{old}"


def noted(looks: Looks, now: float) -> str:
    """The last trouble, as long as it lasts and a while longer."""
    return looks.trouble if looks.in_vain or now - looks.failed_at < NOTE_S else ""


def reason(error: Exception) -> str:
    """Why a source does not answer."""
    if isinstance(error, grpc.aio.AioRpcError):
        return describe(error)
    return str(error) if isinstance(error, KvError) else f"no answer within {READ_S:g} s"
