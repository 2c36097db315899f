"""The gateway process: every part made, connected, started, and stopped in order."""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc

from gateway import fleet, service
from gateway.auth import KEYS_S, doorman
from gateway.config import MAX_MESSAGE_BYTES, MAX_RESPONSE_BYTES, address, require_port
from gateway.dispatch import Dispatch
from gateway.fleet import FleetService
from gateway.health import Health
from gateway.metrics import Metrics
from gateway.models import Models
from gateway.output import Output
from gateway.pages import Stored, open_store
from gateway.placing import Placing
from gateway.reaper import REAP_S, Lease, Reaper
from gateway.reflection import add_reflection
from gateway.rehoming import Rehoming
from gateway.relay import Relay
from gateway.router import Policy
from gateway.service import InferenceService
from gateway.structures import Structures
from gateway.tasks import Tasks, every
from gateway.tokenize import TokenizerPool
from gateway.transport import http_context, require_guarded, server_credentials
from kvstore.client import BrokerConfig, connect
from kvstore.dead import DeadJobs
from kvstore.errors import BrokerError
from kvstore.jobs import Jobs
from kvstore.prefix_index import PrefixIndex
from kvstore.registry import HEARTBEAT_S, Registry, new_incarnation
from kvstore.tracing import tracing

if TYPE_CHECKING:
    import ssl

    from gateway.config import GatewayConfig
    from gateway.http.server import HttpServer
    from kvstore.client import Broker

logger = logging.getLogger(__name__)

OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_RESPONSE_BYTES),
    # A client whose host died sends nothing: pings find out, and its jobs are ended.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Clients may ping as often as every 5 s, with or without a call, to get through idle proxies.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)
LEDGER_S: Final = 5.0
"""How often the ledger is read for those who watch it."""
CUT_S: Final = 2.0
"""How long the calls that the grace time has cut off get to send their status."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Where a started gateway is. Addresses are HOST:PORT."""

    grpc: str
    metrics: str
    http: str | None
    """None: there is no HTTP."""
    incarnation: str


class Gateway:
    """One gateway. ``start``, then ``stop`` once."""

    def __init__(self, config: GatewayConfig, incarnation: str | None = None) -> None:
        """``incarnation``: what this life is called; None: a new name. Raises TracingUnavailable."""
        self._config = config
        self.incarnation = incarnation or new_incarnation()
        self._stack = AsyncExitStack()
        self._tasks = Tasks()
        self._loops = Tasks()
        self._health = Health()
        self._looked = asyncio.Event()
        self._pages: Stored | None = None
        # Two gateways on one port by mistake would share its connections silently: it has to be asked for.
        self._server = grpc.aio.server(options=(*OPTIONS, ("grpc.so_reuseport", int(config.reuse_port))))
        self._http: HttpServer | None = None
        self._tracing = tracing(config.otlp, role="gateway", incarnation=self.incarnation)
        self.metrics = Metrics(self._tracing)

    async def start(self) -> Ready:
        """Connects and serves. Raises BrokerError, and KeysDamaged for API keys that can't be read; before the broker
        is waited for, TransportError for a place that is too open, or certificates that are none, PortError for a port
        that can't be listened on, and PlaceError for pages that can't be where they are said to be."""
        config = self._config
        require_guarded(config)
        credentials, tls = server_credentials(config), http_context(config)
        require_port(config.host, config.grpc_port, "--grpc-port", reuse=config.reuse_port)
        require_port(config.host, config.metrics_port, "--metrics-port")
        if config.http_port is not None:
            require_port(config.host, config.http_port, "--http-port", reuse=config.reuse_port)
        store = open_store(config.pages, config.pages_redis, config.redis, config.namespace, config.pages_ttl)
        self._stack.push_async_callback(self._tracing.close)
        try:
            if store is not None:
                self._pages = Stored(store)
                self._stack.push_async_callback(self._pages.close)
            broker = await connect(BrokerConfig(config.redis, config.namespace))
            self._stack.push_async_callback(broker.close)
            self._doorman = doorman(config.keys, broker)
            await self._doorman.look()
            await self._assemble(broker)
            if config.reuse_port:
                # Connections come as soon as it listens, while others could take them: it has to know the models first.
                await self._looked.wait()
            self._stack.push_async_callback(self.metrics.close)
            metrics = self.metrics.serve(config.host, config.metrics_port)
            port = self._listen(credentials)
            self._stack.push_async_callback(self._server.stop, None)
            await self._server.start()
            http = await self._start_http(tls)
            await self._health.begin()
        except BaseException:
            await self._stack.aclose()
            raise
        return Ready(address(config.host, port), metrics, http, self.incarnation)

    async def stop(self, hurry: asyncio.Event) -> None:
        """Drains: NOT_SERVING and no new calls at once; streams go on for the grace time, or until `hurry` is set;
        then they end with UNAVAILABLE."""
        drained = asyncio.create_task(self._inference.drain(), name="drain")
        await self._health.stop()
        hurried = asyncio.create_task(hurry.wait(), name="hurry")
        await asyncio.wait((drained, hurried), timeout=self._config.grace_s, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        cut = len(self._relay)
        await self._relay.close()
        await asyncio.wait((drained,), timeout=CUT_S)
        drained.cancel()
        if self._http is not None:
            await self._http.stop(CUT_S)
        await self._server.stop(None)
        await self._tasks.drain(CUT_S)
        await self._loops.cancel()  # first, or the lease would be renewed after it was given back
        if cut:
            # The lease is left to lapse: for that long another gateway may take over the jobs.
            logger.warning("stopped with %d streams cut off", cut)
        else:
            with suppress(BrokerError, TimeoutError):  # without a broker there is nothing to give back
                async with asyncio.timeout(CUT_S):
                    await self._registry.leave_gateway(self.incarnation)
        await self._stack.aclose()

    def _listen(self, credentials: grpc.ServerCredentials | None) -> int:
        where = address(self._config.host, self._config.grpc_port)
        if credentials is None:
            return self._server.add_insecure_port(where)
        return self._server.add_secure_port(where, credentials)

    async def _start_http(self, tls: ssl.SSLContext | None) -> str | None:
        config = self._config
        if config.http_port is None:
            return None
        # Who serves no HTTP does without what that takes: half a second, and tens of megabytes.
        from gateway.http.server import HttpServer

        desk = None
        if config.batches:
            from gateway.http.desk import Desk

            desk = Desk(config.redis, config.namespace, Path(config.batches))
        http = HttpServer(
            service=self._inference,
            doorman=self._doorman,
            models=self._models,
            tokenizers=self._tokenizers,
            metrics=self.metrics,
            serves=lambda: self._health.serves,
            desk=desk,
        )
        told = await http.start(config.host, config.http_port, tls, reuse_port=config.reuse_port)
        self._http = http
        return told

    async def _assemble(self, broker: Broker) -> None:
        """Makes all parts, starts those that run, and registers their services."""
        config, incarnation = self._config, self.incarnation
        jobs = Jobs(broker)
        self._registry = registry = Registry(broker)
        self._relay = relay = Relay(broker, jobs, incarnation)
        self._stack.push_async_callback(relay.close)
        self._tokenizers = tokenizers = TokenizerPool(config.tokenizer_threads)
        self._stack.push_async_callback(tokenizers.close)
        structures = Structures()
        self._stack.push_async_callback(structures.close)
        self._stack.push_async_callback(self._tasks.cancel)
        self._models = models = Models(registry, tokenizers, self._tasks)
        placing = Placing(
            *(registry, PrefixIndex(broker)),
            max_queue=config.max_queue,
            rng=random.Random(),
            policy=Policy(config.policy),
            pages=self._pages,
        )
        dispatch = Dispatch(jobs, models, placing, gateway=incarnation, max_queue=config.max_queue)
        output = Output(
            dispatch=dispatch, models=models, relay=relay, jobs=jobs, tasks=self._tasks, metrics=self.metrics
        )
        self._inference = InferenceService(
            models=models,
            tokenizers=tokenizers,
            structures=structures,
            output=output,
            relay=relay,
            jobs=jobs,
            metrics=self.metrics,
            max_streams=config.max_streams,
            doorman=self._doorman,
        )
        lease = Lease(registry, incarnation, self._health.lease)
        operators = FleetService(registry, jobs, DeadJobs(broker), models, dispatch, placing.breaker, self._doorman)
        self._watch(broker, placing, models, lease)
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, self._server)
        self._server.add_generic_rpc_handlers((self._inference.handler(), operators.handler()))
        add_reflection((service.NAME, fleet.NAME, health.SERVICE_NAME), self._server)
        # The lease stands before the first job can name this gateway.
        await registry.renew_gateway(incarnation)
        await relay.start()
        self._start_loops(lease, Rehoming(jobs, registry, placing), jobs, models, placing)

    def _watch(self, broker: Broker, placing: Placing, models: Models, lease: Lease) -> None:
        """Has the metrics show what parts keep themselves."""
        relay, metrics = self._relay, self.metrics
        metrics.watch_broker(broker.spent)
        metrics.watch_index(lambda: placing.index)
        metrics.watch_door(lambda: self._doorman.refused)
        metrics.watch_breaker(lambda: placing.breaker.open)
        metrics.watch_fleet(lambda: models.states, lambda: lease.held)
        metrics.watch_relay(lambda: relay.malformed + broker.malformed, lambda: relay.refills)

    def _start_loops(self, lease: Lease, rehoming: Rehoming, jobs: Jobs, models: Models, placing: Placing) -> None:
        async def look() -> None:
            try:
                await self._health.models(await models.refresh())
                placing.breaker.keep(models.lives)
            finally:
                self._looked.set()

        self._stack.push_async_callback(self._loops.cancel)
        for interval_s, action, what in (
            (HEARTBEAT_S, lease.renew, "renewing the gateway's lease"),
            (REAP_S, Reaper(rehoming, lease, self.metrics.count_rehomed).reap, "moving the jobs of dead workers"),
            (1.0, lambda: self.metrics.queues.refresh(jobs), "reading the queues"),
            (LEDGER_S, lambda: self.metrics.ledger.refresh(jobs), "reading the ledger"),
            (1.0, look, "looking for models"),
            (KEYS_S, self._doorman.look, "reading the API keys"),
        ):
            self._loops.spawn(every(interval_s, action, what=what), name=what)
