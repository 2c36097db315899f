"""`octavo bench streams`: what one gateway adds to each token of many open streams, and what it bears meanwhile.

A fleet of its own on a model that takes time and nothing else, for gRPC and for HTTP in turn. All streams are opened at
once, twice, with the same prompts: first alone, then while troublemakers (``bench.streams_trouble``) send what is too
large or no request at all, and leave in the middle. When a token was committed is told by the ids of its token log, in
whole milliseconds of the broker's clock, which is this machine's: what is added counts the rest of that millisecond
too. Each stream must bring exactly what its log has, and the same both times.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import psutil

from bench.machine import describe_machine
from bench.streams_client import Load, by_grpc, by_http, request_of
from bench.streams_figures import Gateway, Kept, figures, unexpected, wrong
from bench.streams_trouble import EXPECTED
from kvstore import token_log
from kvstore.client import BrokerConfig, connect
from ops.config import FleetConfig
from ops.console import Loading
from ops.fleet import Fleet

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from kvstore.client import Broker
    from octavo.v1 import inference_pb2

PROTOCOLS: Final = ("grpc", "http")
LOOK_S: Final = 0.5
"""Between two looks at the gateway's memory."""
PREFILL_TOK_S: Final = 100_000
SPARE_PLACES: Final = 1.25
"""Places of the workers over streams: troublemakers ask too, and no stream is to wait."""
WARM_UP: Final = 4
"""Streams before the gateway's memory is looked at for the first time."""
MOST_QUEUED: Final = 64
"""Jobs that a gateway gives one worker, as it is set up here."""


class StreamsFailed(Exception):  # noqa: N818 - it says what happened
    """Some stream was touched, or some troublemaker was answered as it should not have been."""


@dataclass(frozen=True, slots=True)
class StreamsConfig:
    """One run."""

    streams: int = 500
    tokens: int = 40
    """Of each stream."""
    prompt_tokens: int = 32
    workers: int = 10
    step_ms: float = 500.0
    """Between two tokens of a stream."""
    pause_ms: float = 100.0
    """Between two troubles."""
    protocols: tuple[str, ...] = PROTOCOLS

    @property
    def patience_s(self) -> float:
        """How long a load may take: several times what its steps do, and a while for its prompts."""
        return 60 + self.streams * 0.2 + 4 * self.tokens * self.step_ms / 1000

    def fleet(self) -> FleetConfig:
        """One gateway, and workers with places for all streams. Raises ValueError: there are too few workers."""
        places = -(-int(self.streams * SPARE_PLACES) // self.workers)
        if places > MOST_QUEUED:
            least = -(-int(self.streams * SPARE_PLACES) // MOST_QUEUED)
            raise ValueError(f"{self.workers} workers are too few for {self.streams} streams: at least {least}")
        return FleetConfig(
            workers=self.workers,
            grpc_port=0,
            http_port=0,
            model=f"simulated:{PREFILL_TOK_S},{self.step_ms:g}",
            max_running=places,
            kv_tokens=2 * places * (self.prompt_tokens + self.tokens + 32),
            threads=1,
        )

    def requests(self, name: str) -> list[inference_pb2.GenerateRequest]:
        """Each with a prompt of its own, which is the same whatever the name."""
        prompts = (
            f"{index:05d} once upon a time there was a stream of words. ".ljust(self.prompt_tokens, "a")
            for index in range(self.streams)
        )
        return [
            request_of(f"{name}-{index}", prompt[: self.prompt_tokens], self.tokens)
            for index, prompt in enumerate(prompts)
        ]


async def run_streams(config: StreamsConfig, note: Callable[[str], None]) -> dict[str, Any]:
    """Measures, and returns what is printed as JSON.

    Raises:
        ChildFailed: a fleet did not start.
        KvError: the broker does not answer.
        StreamsFailed: a stream was touched.
        ValueError: there are too few workers.
    """
    settings, machine = config.fleet(), describe_machine()
    loads: dict[str, Any] = {}
    for protocol in config.protocols:
        note(f"starting a gateway and {config.workers} workers")
        async with Run.of(config, settings, protocol, note) as run:
            for name, load in (await run.both()).items():
                loads[f"{protocol}, {name}"] = load
    return {"machine": machine, "config": asdict(config), "loads": loads}


class Run:
    """The loads of one protocol, on one fleet."""

    def __init__(
        self, config: StreamsConfig, fleet: Fleet, broker: Broker, protocol: str, note: Callable[[str], None]
    ) -> None:
        self._config = config
        self._broker = broker
        self._protocol = protocol
        self._note = note
        self._target = fleet.targets[0]
        self._http = str(fleet.gateways[0].child.ready["http"])
        self._process = psutil.Process(fleet.gateways[0].child.pid)

    @classmethod
    @asynccontextmanager
    async def of(
        cls, config: StreamsConfig, settings: FleetConfig, protocol: str, note: Callable[[str], None]
    ) -> AsyncIterator[Run]:
        """Starts the fleet, and stops it."""
        async with AsyncExitStack() as stack:
            loading = Loading()
            fleet = await stack.enter_async_context(Fleet(settings, loading.sink, note))
            loading.over = True
            broker = await connect(BrokerConfig(fleet.redis, settings.namespace))
            stack.push_async_callback(broker.close)
            yield cls(config, fleet, broker, protocol, note)

    async def both(self) -> dict[str, Any]:
        """Alone, and in trouble. Raises StreamsFailed."""
        name = secrets.token_hex(4)
        warm = self._config.requests(f"{name}-warm")[:WARM_UP]
        await self._read(warm, Load(len(warm)))
        before = self._process.memory_info().rss
        self._note(f"{self._config.streams} streams by {self._protocol}")
        alone, kept = await self._load(f"{name}-alone", before, None)
        self._note("and again, beside troublemakers")
        async with troublemakers(self._target, self._http, self._config.pause_ms / 1000) as trouble:
            beside, _ = await self._load(f"{name}-beside", before, kept, trouble.begin)
            beside["trouble"] = await trouble.end()
        if bad := unexpected(beside["trouble"], EXPECTED):
            raise StreamsFailed(f"troublemakers were answered otherwise than they should have been: {'; '.join(bad)}")
        return {"alone": alone, "beside trouble": beside}

    async def _load(
        self, name: str, before: int, expected: Sequence[Kept] | None, begin: Callable[[], None] = lambda: None
    ) -> tuple[dict[str, Any], list[Kept]]:
        requests = self._config.requests(name)
        load = Load(len(requests))
        reading = asyncio.create_task(self._read(requests, load))
        reading.add_done_callback(lambda _: load.ended())  # however it ended
        await load.all_open.wait()
        begin()
        gateway = await self._watch(load, before)
        await reading
        kept = [await self._kept(request.request_id) for request in requests]
        if bad := wrong(load.told, kept, expected, self._config.tokens):
            told = "; ".join(f"{reason}: {count}" for reason, count in bad.items())
            raise StreamsFailed(f"of {len(requests)} streams by {self._protocol}, {told}")
        return figures(load.told, kept, gateway), kept

    async def _read(self, requests: Sequence[inference_pb2.GenerateRequest], load: Load) -> None:
        """Raises StreamsFailed: they do not end."""
        patience_s = self._config.patience_s
        try:
            async with asyncio.timeout(patience_s):
                if self._protocol == "grpc":
                    await by_grpc(self._target, requests, load)
                else:
                    await by_http(self._http, requests, load)
        except TimeoutError:
            raise StreamsFailed(f"streams by {self._protocol} have not ended after {patience_s:g} s") from None

    async def _watch(self, load: Load, before: int) -> Gateway:
        """The gateway, while all streams are open."""
        spent, most = self._cpu_s(), 0
        while True:
            most = max(most, self._process.memory_info().rss)
            try:
                await asyncio.wait_for(load.first_end.wait(), LOOK_S)
            except TimeoutError:
                continue
            return Gateway(self._cpu_s() - spent, before, most)

    def _cpu_s(self) -> float:
        spent = self._process.cpu_times()
        return spent.user + spent.system

    async def _kept(self, request_id: str) -> Kept:
        """What the log of a job has, and when it came there."""
        entries: list[tuple[bytes, dict[bytes, bytes]]] = await self._broker.call(
            "XRANGE", self._broker.keys.log(request_id), "-", "+"
        )
        committed: list[tuple[float, int]] = []
        ids: list[int] = []
        text, had = "", 0
        for entry_id, fields in entries:
            for delivery in token_log.decode(fields[token_log.FIELD]):
                ids.extend(delivery.chunk.token_ids)
                text += delivery.chunk.text
            count = len(ids) if self._protocol == "grpc" else len(text)
            if count > had:
                committed.append((int(entry_id.partition(b"-")[0]) / 1000, count))
                had = count
        return Kept(committed, ids if self._protocol == "grpc" else text, len(ids))


class Troublemakers:
    """A process that makes trouble between `begin` and `end`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    def begin(self) -> None:
        """From now on."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")

    async def end(self) -> dict[str, dict[str, int]]:
        """What each kind was answered, how often."""
        out, _ = await self._process.communicate(b"")  # which closes its stdin
        told: dict[str, dict[str, int]] = json.loads(out) if out else {}
        return told


@asynccontextmanager
async def troublemakers(target: str, http: str, pause: float) -> AsyncIterator[Troublemakers]:
    """Started, and ended with the block at the latest."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "bench.streams_trouble", target, http, f"{pause:g}"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Troublemakers(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
