"""`octavo bench path`: where a token's time goes, between client and model and back.

A gateway and a worker of their own, and the same engine in this process. Both get the same requests in turn, so that
whatever else the machine does disturbs them alike. What the processes did is read from their own metrics, before and
after; in this process the engine runs under clocks.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.engine import EngineConfig, OurEngine
from bench.machine import describe_machine
from bench.path_engine import Ran, TimedEngine, as_engine_takes_it
from bench.path_figures import First, Streams, Told, first_figures, since, stream_figures
from bench.runner import TIMEOUT_S
from bench.scrape import scrape
from bench.workload import Lengths, Workload
from gateway.tokenize import ModelTokenizer
from kvstore.client import BrokerConfig, connect
from kvstore.registry import Registry
from ops.child import ChildFailed
from ops.client import BrokenStream, Client, plain
from ops.config import usable_cores
from ops.console import Loading
from ops.fleet import Fleet
from worker.__main__ import default_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.path_figures import Values
    from kvstore.client import Broker
    from octavo.v1 import inference_pb2
    from ops.config import FleetConfig

FIRST_TOKENS: Final = 8
"""Of an answer whose first token is looked at: the engine is in its next step by then, as with any answer."""


@dataclass(frozen=True, slots=True)
class PathConfig:
    """One run. Lengths in tokens, about: prompts are English text."""

    requests: int = 20
    """One after the other, for the first token."""
    streams: int = 32
    """At once, for the time per token."""
    rounds: int = 5
    """Of so many streams."""
    prompt_tokens: int = 128
    output_tokens: int = 64
    """Of each stream."""
    seed: int = 0

    def requests_of(self, name: str, turn: int, count: int, new: int) -> list[inference_pb2.GenerateRequest]:
        """Greedy requests of text, each with a salt of its own: none finds anything in a cache."""
        lengths = Lengths(self.prompt_tokens, self.prompt_tokens)
        workload = Workload(lengths, Lengths(new, new), kind="text", seed=self.seed)
        made = workload.requests(count, 2, stream=turn)
        for index, request in enumerate(made):
            request.cache_salt = f"{self.seed}/{name}/{turn}/{index}"
        return made


async def run_path(config: PathConfig, settings: FleetConfig, note: Callable[[str], None]) -> dict[str, Any]:
    """Measures, and returns what is printed as JSON.

    Raises:
        grpc.aio.AioRpcError: a request failed.
        ChildFailed: the fleet did not start.
        BadAnswerError: a request failed in this process.
        BrokenStream: an answer was none.
        KvError: the broker does not answer.
        ModelError: the model can't be found, read or run.
    """
    machine = describe_machine()
    async with AsyncExitStack() as stack:
        loading = Loading()
        fleet = await stack.enter_async_context(Fleet(settings, loading.sink, note))
        loading.over = True
        ours = await asyncio.to_thread(OurEngine, engine_config(settings), note)
        client = await stack.enter_async_context(Client(fleet.targets[0]))
        broker = await connect(BrokerConfig(fleet.redis, settings.namespace))
        stack.push_async_callback(broker.close)
        model = await client.model()
        card = await Registry(broker).model(model.fingerprint)
        if card is None:
            raise ChildFailed("the worker's model card is not in the broker")
        tokenizer = await asyncio.to_thread(ModelTokenizer, card)
        pair = Pair(fleet, client, broker, tokenizer, TimedEngine(ours.engine))
        note(f"{config.requests} requests, one after the other")
        await pair.warm_up(config)
        first = [await pair.first(request) for request in config.requests_of("first", 1, config.requests, FIRST_TOKENS)]
        streams = []
        for turn in range(config.rounds):
            note(f"round {turn + 1} of {config.streams} streams")
            streams.append(
                await pair.streams(config.requests_of("streams", 2 + turn, config.streams, config.output_tokens))
            )
    return {
        "machine": machine,
        "model": plain(model),
        "threads": settings.threads_per_worker(usable_cores()),
        "config": asdict(config),
        "first_token": first_figures(first),
        "streams": stream_figures(streams, config.streams),
    }


class Pair:
    """The service and the engine in this process, which answer the same requests in turn."""

    def __init__(
        self, fleet: Fleet, client: Client, broker: Broker, tokenizer: ModelTokenizer, engine: TimedEngine
    ) -> None:
        self._addresses = [str(member.child.ready["metrics"]) for member in (fleet.gateways[0], fleet.workers[0])]
        self._client = client
        self._broker = broker
        self._tokenizer = tokenizer
        self._engine = engine
        self._runs = 0

    async def warm_up(self, config: PathConfig) -> None:
        """Both answer some requests that nobody measures."""
        for count in (config.streams, 1):
            await self.streams(config.requests_of(f"warm {count}", 0, count, FIRST_TOKENS))

    async def first(self, request: inference_pb2.GenerateRequest) -> First:
        """One request alone."""
        before = await self._read()
        answer = await self._client.generate(request, timeout=TIMEOUT_S)
        told = _told(before, await self._read())
        ran = await self._run([request])
        if answer.first_token_s is None or answer.route is None:
            raise BrokenStream("an answer without a token, or without its route")
        return First(told, answer.first_token_s, answer.route.prefill_ms / 1000, ran.first_token, ran.first_parts)

    async def streams(self, requests: Sequence[inference_pb2.GenerateRequest]) -> Streams:
        """All of them at once."""
        before, broker_before = await self._read(), await self._broker_cpu()
        cpu, began = time.process_time(), time.perf_counter()
        answers = await asyncio.gather(*(self._client.generate(each, timeout=TIMEOUT_S) for each in requests))
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        told, broker_cpu = _told(before, await self._read()), await self._broker_cpu() - broker_before
        ran = await self._run(requests)
        tokens = sum(len(answer.token_ids) for answer in answers)
        return Streams(told, tokens, wall, cpu, broker_cpu, ran.wall, ran.parts)

    async def _run(self, requests: Sequence[inference_pb2.GenerateRequest]) -> Ran:
        """In this process, from token ids on."""
        self._runs += 1
        prompts = [self._tokenizer.encode_text(request.text) for request in requests]
        taken = [
            as_engine_takes_it(request, f"{self._runs}/{index}", prompt)
            for index, (request, prompt) in enumerate(zip(requests, prompts, strict=True))
        ]
        return await asyncio.to_thread(self._engine.run, taken)

    async def _read(self) -> tuple[Values, Values]:
        gateway, worker = [await asyncio.to_thread(scrape, address) for address in self._addresses]
        return gateway, worker

    async def _broker_cpu(self) -> float:
        """Processor seconds that the broker has taken so far."""
        info: dict[str, Any] = await self._broker.call("INFO", "cpu")
        return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


def engine_config(settings: FleetConfig) -> EngineConfig:
    """An engine as the fleet's worker has it."""
    sizes = {
        name: getattr(settings, name)
        for name in (
            *("kv_tokens", "cache_tokens", "block_size", "block_run"),
            *("max_running", "step_tokens", "chunk_tokens"),
        )
    }
    return EngineConfig(
        model=settings.model,
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        device=settings.device,
        kernels=settings.kernels,
        threads=settings.threads_per_worker(usable_cores()),
        cache_dir=Path(os.environ.get("OCTAVO_CACHE") or default_cache()).expanduser(),
        **{name: size for name, size in sizes.items() if size is not None},
    )


def _told(before: tuple[Values, Values], after: tuple[Values, Values]) -> Told:
    gateway, worker = (since(earlier, later) for earlier, later in zip(before, after, strict=True))
    return Told(gateway, worker)
