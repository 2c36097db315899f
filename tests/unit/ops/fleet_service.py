"""A gateway of which operators ask, on a real socket: it gives the answers that a test sets."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc

from octavo.v1 import fleet_pb2, fleet_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator


class Operators(fleet_pb2_grpc.FleetServicer):
    """`asked` has the requests that it got."""

    def __init__(
        self,
        *,
        ledger: fleet_pb2.LedgerResponse | None = None,
        dead: tuple[fleet_pb2.Dead, ...] = (),
        workers: tuple[fleet_pb2.Worker, ...] = (),
    ) -> None:
        self.asked: list[Any] = []
        self.target = ""
        self._ledger = ledger
        self._dead = dead
        self._workers = workers

    def ListWorkers(self, request: Any, _context: grpc.ServicerContext) -> fleet_pb2.ListWorkersResponse:  # noqa: N802
        self.asked.append(request)
        return fleet_pb2.ListWorkersResponse(workers=self._workers)

    def GetQueues(self, request: Any, _context: grpc.ServicerContext) -> fleet_pb2.GetQueuesResponse:  # noqa: N802
        self.asked.append(request)
        return fleet_pb2.GetQueuesResponse()

    def Ledger(self, request: Any, context: grpc.ServicerContext) -> fleet_pb2.LedgerResponse:  # noqa: N802
        self.asked.append(request)
        if self._ledger is None:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the broker does not answer; try again")
        return self._ledger

    def ListDead(self, request: Any, _context: grpc.ServicerContext) -> fleet_pb2.ListDeadResponse:  # noqa: N802
        self.asked.append(request)
        return fleet_pb2.ListDeadResponse(jobs=self._of(request.request_id))

    def RetryDead(self, request: Any, context: grpc.ServicerContext) -> fleet_pb2.RetryDeadResponse:  # noqa: N802
        self.asked.append(request)
        if not self._of(request.request_id):
            context.abort(grpc.StatusCode.NOT_FOUND, f"there is no dead job {request.request_id!r}")
        return fleet_pb2.RetryDeadResponse(request_id=f"{request.request_id}.retry-1")

    def DropDead(self, request: Any, _context: grpc.ServicerContext) -> fleet_pb2.DropDeadResponse:  # noqa: N802
        self.asked.append(request)
        return fleet_pb2.DropDeadResponse(dropped=len(self._of(request.request_id)))

    def _of(self, request_id: str) -> list[fleet_pb2.Dead]:
        return [each for each in self._dead if request_id in ("", each.request_id)]


@contextmanager
def serving(operators: Operators) -> Iterator[Operators]:
    """It runs inside; `target` says where."""
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        fleet_pb2_grpc.add_FleetServicer_to_server(operators, server)
        operators.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield operators
        finally:
            server.stop(None).wait()
