"""The gateway as the command, the demo and the benchmark call it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2, inference_pb2_grpc
from ops.answer import Answer, BrokenStream, plain
from ops.reach import Target

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from types import TracebackType

    from gateway.access import Access

__all__ = ["Answer", "BrokenStream", "Client", "Failed", "chat_request", "describe", "plain"]

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
ASK_TIMEOUT_S = 10.0
"""How long a gateway may take to answer what needs no model."""
# The default limit of 4 MiB on responses does: gateways send no more. A proxy in the environment is for the outside,
# never on the way to a gateway.
OPTIONS = [("grpc.enable_http_proxy", 0)]
_ELSEWHERE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
"""What one gateway says, and the next one need not."""
_TLS: Final = (
    ("WRONG_VERSION_NUMBER", "what answers there speaks no TLS: leave out --tls-ca, or choose another --target"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not signed by what --tls-ca trusts, or is not valid"),
    ("ostname", "its certificate is for another host than the one in --target"),
    ("Socket closed", "it hangs up at once: it may want TLS (--tls-ca), or a certificate as well (--tls-cert)"),
)
"""Signs in the library's words of what is wrong between plaintext and TLS, and what to tell of it."""


class Gateway:
    """A connection to one. The generated stubs are untyped: their calls are typed once, in Client."""

    def __init__(self, address: str, access: Access | None) -> None:
        from gateway.access import OPEN, keyed, open_channel  # here: nothing of a gateway is loaded for --help

        access = access or OPEN
        self.channel = open_channel(address, access, OPTIONS)
        channel = keyed(self.channel, access)
        self.inference: Any = inference_pb2_grpc.InferenceStub(channel)
        self.fleet: Any = fleet_pb2_grpc.FleetStub(channel)
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)


class Client:
    """Asks the gateways that `target` names; an async context manager. What needs no model is asked of the next one
    where one is unavailable, or does not answer in time; answers come from the first."""

    def __init__(self, target: Target | str) -> None:
        reached = Target(target) if isinstance(target, str) else target
        self._gateways = [Gateway(each, reached.access) for each in reached.addresses]

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for gateway in self._gateways:
            await gateway.channel.close()

    async def _ask(self, method: Callable[[Gateway], Any], request: Any) -> Any:
        *others, last = self._gateways
        for gateway in others:
            try:
                return await method(gateway)(request, timeout=ASK_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if error.code() not in _ELSEWHERE:
                    raise
        return await method(last)(request, timeout=ASK_TIMEOUT_S)

    async def responses(
        self, request: inference_pb2.GenerateRequest, *, timeout: float | None = None
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """The stream of one Generate call. Leaving it early cancels the call.

        Raises:
            grpc.aio.AioRpcError: as the service says.
        """
        call = self._gateways[0].inference.Generate(request, timeout=timeout)
        try:
            async for response in call:
                yield response
        finally:
            call.cancel()

    async def generate(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        timeout: float | None = None,
        on_text: Callable[[str], None] | None = None,
        on_response: Callable[[inference_pb2.GenerateResponse, Answer], None] | None = None,
        into: Answer | None = None,
    ) -> Answer:
        """One whole answer; `on_text` gets the text of its first choice as it comes, `on_response` each response with
        the answer so far. `into`, a new Answer of as many choices, has what came until then when the call fails.

        Raises:
            grpc.aio.AioRpcError: as the service says.
            BrokenStream: the stream broke the service's promises.
        """
        answer = into if into is not None else Answer(request_id=request.request_id, n=max(request.n, 1))
        started = time.monotonic()
        try:
            async for response in self.responses(request, timeout=timeout):
                text = answer.add(response, time.monotonic() - started)
                if text and on_text is not None:
                    on_text(text)
                if on_response is not None:
                    on_response(response, answer)
        finally:
            answer.total_s = time.monotonic() - started
        answer.end(answer.total_s)
        return answer

    async def cancel(self, request_id: str) -> bool:
        """True when this call ended a live job."""
        request = inference_pb2.CancelRequest(request_id=request_id)
        response = await self._ask(lambda gateway: gateway.inference.Cancel, request)
        return bool(response.cancelled)

    async def model(self, name: str = "") -> inference_pb2.Model:
        """The model served; `name` may be empty where there is one only."""
        request = inference_pb2.GetModelRequest(name=name)
        model: inference_pb2.Model = await self._ask(lambda gateway: gateway.inference.GetModel, request)
        return model

    async def serves(self) -> bool:
        """Whether the gateway says that answers can be had: it holds its lease, and a live worker serves."""
        request = health_pb2.HealthCheckRequest(service=INFERENCE)
        response = await self._ask(lambda gateway: gateway.health.Check, request)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def workers(self) -> list[fleet_pb2.Worker]:
        """The live workers, by id."""
        response = await self._ask(lambda gateway: gateway.fleet.ListWorkers, fleet_pb2.ListWorkersRequest())
        return sorted(response.workers, key=lambda worker: str(worker.id))

    async def explain(self, request_id: str) -> fleet_pb2.ExplainResponse:
        """Why a job went where it went. Raises AioRpcError: NOT_FOUND when it is unknown."""
        request = fleet_pb2.ExplainRequest(request_id=request_id)
        found: fleet_pb2.ExplainResponse = await self._ask(lambda gateway: gateway.fleet.Explain, request)
        return found

    async def ledger(self) -> fleet_pb2.LedgerResponse:
        """What became of all requests that were ever accepted."""
        found: fleet_pb2.LedgerResponse = await self._ask(
            lambda gateway: gateway.fleet.Ledger, fleet_pb2.LedgerRequest()
        )
        return found

    async def dead(self, request_id: str = "") -> list[fleet_pb2.Dead]:
        """Jobs that too many workers died of, the latest first; the one of that id, if one is given."""
        request = fleet_pb2.ListDeadRequest(request_id=request_id)
        response = await self._ask(lambda gateway: gateway.fleet.ListDead, request)
        return list(response.jobs)

    async def retry_dead(self, request_id: str) -> str:
        """Runs a dead job again, as a detached one, whose id this is. Raises AioRpcError: NOT_FOUND."""
        request = fleet_pb2.RetryDeadRequest(request_id=request_id)
        response = await self._ask(lambda gateway: gateway.fleet.RetryDead, request)
        return str(response.request_id)

    async def drop_dead(self, request_id: str = "") -> int:
        """Forgets a dead job, or all of them. How many there were."""
        request = fleet_pb2.DropDeadRequest(request_id=request_id)
        response = await self._ask(lambda gateway: gateway.fleet.DropDead, request)
        return int(response.dropped)

    async def queues(self) -> list[fleet_pb2.Queue]:
        """Every worker's queue, by worker."""
        response = await self._ask(lambda gateway: gateway.fleet.GetQueues, fleet_pb2.GetQueuesRequest())
        return sorted(response.queues, key=lambda queue: str(queue.worker))


def chat_request(
    messages: Sequence[tuple[str, str]],
    *,
    max_tokens: int | None = None,
    sampling: inference_pb2.Sampling | None = None,
    stop: Sequence[str] = (),
) -> inference_pb2.GenerateRequest:
    """A chat request; `messages` are (role, content) pairs. Without `sampling` the answer is greedy."""
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role=role, content=text) for role, text in messages])
    return inference_pb2.GenerateRequest(
        chat=chat,
        sampling=sampling if sampling is not None else inference_pb2.Sampling(temperature=0.0),
        stopping=inference_pb2.Stopping(max_tokens=max_tokens, stop=stop),
    )


class Failed(Protocol):
    """The error of a call, by either of the library's two interfaces."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...


def describe(error: Failed) -> str:
    """One line for people: `UNAVAILABLE: no live worker`."""
    # The library's own words, which name neither the cause nor the cure.
    details = error.details() or "no details"
    if "failed to connect" in details and (trouble := next((why for sign, why in _TLS if sign in details), "")):
        return f"UNAVAILABLE: {trouble} ({details})"
    if "failed to connect" in details:
        return f"UNAVAILABLE: nothing answers there; is `octavo up` running, and is --target right? ({details})"
    if details.startswith(("DNS resolution failed", "errors resolving")):
        return f"UNAVAILABLE: no machine has that name; is --target right? ({details})"
    if details == "Deadline Exceeded":
        return "DEADLINE_EXCEEDED: the gateway did not answer in time; is it overloaded, or stopped?"
    return f"{error.code().name}: {details}"
