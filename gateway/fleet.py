"""The Fleet service: what operators ask."""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from google.protobuf.json_format import MessageToJson
from google.protobuf.message import DecodeError

from gateway.auth import check_job_name
from gateway.config import MAX_RESPONSE_BYTES
from gateway.dispatch import Order
from gateway.errors import DeadJobNotFound, JobNotFound, Overloaded
from gateway.rpc import Method, service_handler
from kvstore.jobs import JobState
from kvstore.limits import MAX_REQUEST_ID
from kvstore.tenants import job_name, request_id_of, tenant_of
from octavo.v1 import fleet_pb2, job_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import grpc

    from gateway.auth import Caller, Doorman
    from gateway.breaker import Breaker
    from gateway.dispatch import Dispatch
    from gateway.models import Models
    from gateway.rpc import Context
    from kvstore.dead import DeadJobs
    from kvstore.jobs import Jobs, QueueInfo
    from kvstore.ledger import Ledger
    from kvstore.registry import Registry, WorkerInfo

NAME: Final = fleet_pb2.DESCRIPTOR.services_by_name["Fleet"].full_name
RETRY: Final = re.compile(r"\.retry-\d+$")
MAX_RETRIES: Final = 16
"""Of one job that are known at a time: those that run, and those that ended a short while ago."""
RESPONSE_SLACK: Final = 4096
"""Bytes of a response that are left free."""
MAX_PAYLOAD: Final = 1 << 20
"""Characters of a dead job's payload that are told: with the longest prompt it fits into a response."""
MESSAGE_OVERHEAD: Final = 8
"""Of each message in another one: its tag and its length."""


class FleetService:
    """Answers from the broker alone, so that every gateway gives the same answer; but for the circuits, of which each
    has its own."""

    def __init__(
        self,
        registry: Registry,
        jobs: Jobs,
        dead: DeadJobs,
        models: Models,
        dispatch: Dispatch,
        breaker: Breaker,
        doorman: Doorman,
    ) -> None:
        self._registry = registry
        self._jobs = jobs
        self._dead = dead
        self._models = models
        self._dispatch = dispatch
        self._breaker = breaker
        self._doorman = doorman

    def handler(self) -> grpc.GenericRpcHandler:
        """What the server registers."""
        methods = {
            "ListWorkers": Method(fleet_pb2.ListWorkersRequest, self.list_workers, operators=True),
            "GetQueues": Method(fleet_pb2.GetQueuesRequest, self.get_queues, operators=True),
            "Explain": Method(fleet_pb2.ExplainRequest, self.explain),
            "Ledger": Method(fleet_pb2.LedgerRequest, self.ledger, operators=True),
            "ListDead": Method(fleet_pb2.ListDeadRequest, self.list_dead, operators=True),
            "RetryDead": Method(fleet_pb2.RetryDeadRequest, self.retry_dead, operators=True),
            "DropDead": Method(fleet_pb2.DropDeadRequest, self.drop_dead, operators=True),
        }
        return service_handler(fleet_pb2.DESCRIPTOR.services_by_name["Fleet"], methods, self._doorman)

    async def list_workers(
        self, _request: fleet_pb2.ListWorkersRequest, _context: Context, _caller: Caller
    ) -> fleet_pb2.ListWorkersResponse:
        """Live workers, by id."""
        live, circuits = await self._registry.workers(), self._breaker.circuits
        workers = [worker_message(info, circuits.get(info.incarnation, "")) for info in live]
        return fleet_pb2.ListWorkersResponse(workers=workers)

    async def get_queues(
        self, _request: fleet_pb2.GetQueuesRequest, _context: Context, _caller: Caller
    ) -> fleet_pb2.GetQueuesResponse:
        """All workers' queues, those of dead workers whose jobs are not ended yet included."""
        queues = [queue_message(info) for info in await self._jobs.queues()]
        return fleet_pb2.GetQueuesResponse(queues=queues)

    async def explain(
        self, request: fleet_pb2.ExplainRequest, _context: Context, caller: Caller
    ) -> fleet_pb2.ExplainResponse:
        """Why a job went where it went, and what it found there: one of the caller's tenant, or for operators any, by
        its name in the fleet. Raises AdmissionError, JobNotFound."""
        check_job_name(request.request_id)
        name = request.request_id if caller.operator else job_name(caller.tenant, request.request_id)
        found = await explanation(self._jobs, name)
        if found is None:
            raise JobNotFound(request.request_id)
        return found

    async def ledger(
        self, _request: fleet_pb2.LedgerRequest, _context: Context, _caller: Caller
    ) -> fleet_pb2.LedgerResponse:
        """What became of all requests that were ever accepted, read in one moment."""
        return ledger_message(await self._jobs.ledger())

    async def list_dead(
        self, request: fleet_pb2.ListDeadRequest, _context: Context, _caller: Caller
    ) -> fleet_pb2.ListDeadResponse:
        """The dead without what they were asked, or with it the one of a request id; the latest first. Raises
        AdmissionError."""
        if not request.request_id:
            messages = (dead_message(each, whole=False) for each in await self._dead.all())
            return fleet_pb2.ListDeadResponse(jobs=fitting(messages))
        check_job_name(request.request_id)
        found = await self._dead.get(request.request_id)
        return fleet_pb2.ListDeadResponse(jobs=[dead_message(found, whole=True)] if found is not None else [])

    async def retry_dead(
        self, request: fleet_pb2.RetryDeadRequest, _context: Context, _caller: Caller
    ) -> fleet_pb2.RetryDeadResponse:
        """Submits a dead job again, detached and under a new id, unless an earlier retry lives; it stays among the dead
        until it is dropped. Raises AdmissionError, DeadJobNotFound, Overloaded, and what a submission does."""
        check_job_name(request.request_id)
        found = await self._dead.get(request.request_id)
        if found is None:
            raise DeadJobNotFound(request.request_id)
        job, free = found.job, 0
        numbers = range(MAX_RETRIES, 0, -1)
        records = await self._jobs.several([retry_id(job.request_id, number) for number in numbers])
        for number, record in zip(numbers, records, strict=True):
            if record is None:
                free = number
            elif record.state is not JobState.ENDED and record.digest == digest_of(again(job, number)):
                return fleet_pb2.RetryDeadResponse(request_id=record.request_id)
        if not free:
            first, last = retry_id(job.request_id, 1), retry_id(job.request_id, MAX_RETRIES)
            raise Overloaded(f"{first!r} to {last!r} are taken; try again later")
        served = await self._models.find(job.model, now=True)
        retry = again(job, free)
        # Who asks for the same at the same time attaches to it.
        self._dispatch.over(await self._dispatch.submit(Order(retry, digest_of(retry), lambda: None), served))
        return fleet_pb2.RetryDeadResponse(request_id=retry.request_id)

    async def drop_dead(
        self, request: fleet_pb2.DropDeadRequest, _context: Context, _caller: Caller
    ) -> fleet_pb2.DropDeadResponse:
        """Forgets the dead, or the one of a request id. Raises AdmissionError."""
        if request.request_id:
            check_job_name(request.request_id)
        return fleet_pb2.DropDeadResponse(dropped=await self._dead.drop(request.request_id))


def retry_id(request_id: str, number: int) -> str:
    """Of a dead job's retry of that number. A retry of a retry counts on."""
    suffix, tenant = f".retry-{number}", tenant_of(request_id)
    return job_name(tenant, RETRY.sub("", request_id_of(request_id))[: MAX_REQUEST_ID - len(suffix)] + suffix)


def again(job: job_pb2.Job, number: int) -> job_pb2.Job:
    """A dead job's copy for its retry of that number: nobody waits for it."""
    copy = job_pb2.Job()
    copy.CopyFrom(job)
    copy.request_id = retry_id(job.request_id, number)
    copy.detached = True
    return copy


def digest_of(job: job_pb2.Job) -> bytes:
    """Names a retry's payload: whoever makes it, it is the same."""
    return hashlib.sha256(job.SerializeToString(deterministic=True)).digest()


def ledger_message(found: Ledger) -> fleet_pb2.LedgerResponse:
    """The ledger, as operators get it."""
    return fleet_pb2.LedgerResponse(
        accepted=found.accepted,
        finished=found.finished,
        failed=found.failed,
        cancelled=found.cancelled,
        expired=found.expired,
        dead=found.dead,
        in_flight=found.in_flight,
    )


def dead_message(record: job_pb2.DeadJob, *, whole: bool) -> fleet_pb2.Dead:
    """A dead job, as operators get it; if `whole`, with what it was asked, which a list shows to nobody.
    Without its payload if that is very long: all that it has more than the rest is sampling and such."""
    told = fleet_pb2.Dead(
        request_id=record.job.request_id,
        model=record.job.model,
        reason=record.reason,
        worker=record.worker,
        attempts=record.attempts,
        died_unix_ms=record.died_unix_ms,
        prompt_tokens=len(record.job.prompt_token_ids),
    )
    if whole:
        payload = MessageToJson(record.job, preserving_proto_field_name=True, indent=None)
        told.prompt_token_ids.extend(record.job.prompt_token_ids)
        told.payload = payload if len(payload) <= MAX_PAYLOAD else ""
    return told


def fitting(messages: Iterable[fleet_pb2.Dead]) -> Iterator[fleet_pb2.Dead]:
    """As many of the first as a response has room for; one in any case."""
    room = MAX_RESPONSE_BYTES - RESPONSE_SLACK
    for number, each in enumerate(messages):
        room -= each.ByteSize() + MESSAGE_OVERHEAD
        if room < 0 and number:
            return
        yield each


def worker_message(info: WorkerInfo, circuit: str = "") -> fleet_pb2.Worker:
    """A lease, as operators get it. ``circuit``: as ``Breaker.circuits`` has it; empty where no gateway is asked."""
    return fleet_pb2.Worker(
        id=info.id,
        incarnation=info.incarnation,
        model=info.model,
        fingerprint=info.fingerprint,
        state=info.state,
        device=info.device,
        dtype=info.dtype,
        block_size=info.block_size,
        context_length=info.context_length,
        kv_tokens=info.kv_tokens,
        max_running=info.max_running,
        running=info.running,
        waiting=info.waiting,
        blocks_free=info.blocks_free,
        blocks_cached=info.blocks_cached,
        blocks_used=info.blocks_used,
        metrics=info.metrics,
        heartbeat_age_ms=info.heartbeat_age_ms,
        prefill_tokens_per_s=info.prefill_tok_s,
        step_ms=info.step_ms,
        sequence_ms=info.sequence_ms,
        fetch_tokens_per_s=info.fetch_tok_s,
        index=info.index,
        heartbeat_unix_ms=info.heartbeat_ms,
        steps=info.steps,
        busy_s=info.busy_s,
        computed_tokens=info.computed_tokens,
        output_tokens=info.output_tokens,
        prefix_queried_tokens=info.prefix_queried,
        prefix_hit_tokens=info.prefix_hit,
        circuit=circuit,
    )


def queue_message(info: QueueInfo) -> fleet_pb2.Queue:
    """A stream, as operators get it."""
    return fleet_pb2.Queue(
        worker=info.worker,
        undelivered=info.undelivered,
        pending=info.pending,
        oldest_age_ms=info.oldest_age_ms,
        stream=info.stream,
    )


async def explanation(jobs: Jobs, request_id: str) -> fleet_pb2.ExplainResponse | None:
    """What is kept of a job and of its route; None: no such job. A record of the route that does not parse, or is
    another job's, is left out. Raises BrokerError."""
    record = await jobs.get(request_id)
    if record is None:
        return None
    route = None
    with suppress(DecodeError):
        found = fleet_pb2.RouteRecord.FromString(await jobs.route(request_id))
        route = found if found.request_id == request_id else None
    return fleet_pb2.ExplainResponse(
        route=route,
        worker=record.worker,
        stolen_from=record.stolen_from,
        state=record.state,
        attempt=record.attempt,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        started=record.started,
        fetched_tokens=record.fetched_tokens,
        predicted_cached_tokens=record.predicted,
    )
