"""The Fleet service: what operators ask."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from gateway.admission import check_request_id
from gateway.errors import JobNotFound
from gateway.rpc import Method, service_handler
from octavo.v1 import fleet_pb2

if TYPE_CHECKING:
    import grpc

    from gateway.rpc import Context
    from kvstore.jobs import Jobs, QueueInfo
    from kvstore.registry import Registry, WorkerInfo

NAME = fleet_pb2.DESCRIPTOR.services_by_name["Fleet"].full_name


class FleetService:
    """Answers from the broker alone, so that every gateway gives the same answer."""

    def __init__(self, registry: Registry, jobs: Jobs) -> None:
        self._registry = registry
        self._jobs = jobs

    def handler(self) -> grpc.GenericRpcHandler:
        """What the server registers."""
        methods = {
            "ListWorkers": Method(fleet_pb2.ListWorkersRequest, self.list_workers),
            "GetQueues": Method(fleet_pb2.GetQueuesRequest, self.get_queues),
            "Explain": Method(fleet_pb2.ExplainRequest, self.explain),
        }
        return service_handler(fleet_pb2.DESCRIPTOR.services_by_name["Fleet"], methods)

    async def list_workers(
        self, _request: fleet_pb2.ListWorkersRequest, _context: Context
    ) -> fleet_pb2.ListWorkersResponse:
        """Live workers, by id."""
        workers = [worker_message(info) for info in await self._registry.workers()]
        return fleet_pb2.ListWorkersResponse(workers=workers)

    async def get_queues(self, _request: fleet_pb2.GetQueuesRequest, _context: Context) -> fleet_pb2.GetQueuesResponse:
        """All workers' queues, those of dead workers whose jobs are not ended yet included."""
        queues = [queue_message(info) for info in await self._jobs.queues()]
        return fleet_pb2.GetQueuesResponse(queues=queues)

    async def explain(self, request: fleet_pb2.ExplainRequest, _context: Context) -> fleet_pb2.ExplainResponse:
        """Why a job went where it went, and what it found there. Raises AdmissionError, JobNotFound."""
        check_request_id(request.request_id)
        found = await explanation(self._jobs, request.request_id)
        if found is None:
            raise JobNotFound(request.request_id)
        return found


def worker_message(info: WorkerInfo) -> fleet_pb2.Worker:
    """A lease, as operators get it."""
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
    )
