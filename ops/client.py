"""The gateway as the command, the demo and the benchmark call it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import grpc.aio
from google.protobuf import json_format
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2, inference_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from types import TracebackType

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
ASK_TIMEOUT_S = 10.0
"""How long a gateway may take to answer what needs no model."""
# The default limit of 4 MiB on responses does: gateways send no more. A proxy in the environment is for the outside,
# never on the way to a gateway.
_OPTIONS = [("grpc.enable_http_proxy", 0)]


class BrokenStream(Exception):  # noqa: N818
    """What a server sent breaks the service's promises: a gap, a repeat, no end or a second one."""


@dataclass(slots=True)
class Choice:
    """One of the answers that a call produces, so far."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: str = ""
    """Name of the FinishReason; empty until the end."""
    stop_match: str = ""
    stop_token: int | None = None
    error: str = ""
    logprobs: list[inference_pb2.TokenLogprobs] = field(default_factory=list)

    def add(self, chunk: inference_pb2.Chunk) -> None:
        """Takes in one of its chunks.

        Raises:
            BrokenStream: token indexes that are not contiguous, or output after the end.
        """
        if self.finish:
            raise BrokenStream(f"choice {self.index}: a chunk after the terminal one")
        if chunk.start != len(self.token_ids):
            expected = f"expected {len(self.token_ids)}"
            raise BrokenStream(f"choice {self.index}: a chunk starts at {chunk.start}, {expected}")
        self.token_ids.extend(chunk.token_ids)
        self.text += chunk.text
        self.logprobs.extend(chunk.logprobs)
        if chunk.finish:
            self.finish = inference_pb2.FinishReason.Name(chunk.finish)
            self.stop_match = chunk.stop_match
            self.stop_token = chunk.stop_token if chunk.HasField("stop_token") else None
            self.error = chunk.error

    def as_dict(self) -> dict[str, Any]:
        """For `--json`. What ended it, and log-probabilities, only where there are any."""
        told: dict[str, Any] = {"text": self.text, "token_ids": self.token_ids, "finish": self.finish}
        if self.stop_match:
            told["stop_match"] = self.stop_match
        if self.stop_token is not None:
            told["stop_token"] = self.stop_token
        return told | ({"logprobs": [plain(each) for each in self.logprobs]} if self.logprobs else {})


@dataclass(slots=True)
class Answer:
    """What one call produced so far, of one choice or several. Times are seconds since the call was made."""

    request_id: str = ""
    n: int = 1
    choices: list[Choice] = field(default_factory=list)
    prompt_logprobs: list[inference_pb2.TokenLogprobs] = field(default_factory=list)
    route: inference_pb2.Route | None = None
    usage: inference_pb2.Usage | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    total_s: float | None = None

    def __post_init__(self) -> None:
        self.choices = [Choice(index) for index in range(self.n)]

    @property
    def text(self) -> str:
        """Of the first choice, as the next ones."""
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish(self) -> str:
        return self.choices[0].finish

    @property
    def error(self) -> str:
        return self.choices[0].error

    def add(self, response: inference_pb2.GenerateResponse, elapsed_s: float) -> str:
        """Takes one response in and returns the text that it brought to the first choice.

        Raises:
            BrokenStream: as ``Choice.add``, or a choice that was not asked for.
        """
        self.request_id = self.request_id or response.request_id
        before = len(self.text)
        for chunk in response.chunks:
            if chunk.choice >= self.n:
                raise BrokenStream(f"{self.request_id}: a chunk of choice {chunk.choice}, of {self.n}")
            try:
                self.choices[chunk.choice].add(chunk)
            except BrokenStream as error:
                raise BrokenStream(f"{self.request_id}: {error}") from None
            self.prompt_logprobs.extend(chunk.prompt_logprobs)
            if chunk.token_ids:
                self.first_token_s = elapsed_s if self.first_token_s is None else self.first_token_s
                self.last_token_s = elapsed_s
        if response.HasField("route"):
            self.route = response.route
        if response.HasField("usage"):
            self.usage = response.usage
        return self.text[before:]

    def end(self, elapsed_s: float) -> None:
        """Notes the end of the call.

        Raises:
            BrokenStream: a choice has no terminal chunk.
        """
        self.total_s = elapsed_s
        if open_ones := [each.index for each in self.choices if not each.finish]:
            name = self.request_id or "the call"
            raise BrokenStream(f"{name} ended without a terminal chunk of choice {', '.join(map(str, open_ones))}")

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time between output tokens after the first, of the longest choice; None with fewer than two."""
        longest = max(len(each.token_ids) for each in self.choices)
        if self.first_token_s is None or self.last_token_s is None or longest < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (longest - 1)

    def about(self) -> dict[str, Any]:
        """For `--json`: all but the choices."""
        told: dict[str, Any] = {
            "request_id": self.request_id,
            "usage": plain(self.usage) if self.usage is not None else None,
            "route": plain(self.route) if self.route is not None else None,
            "timings": {
                "first_token_s": self.first_token_s,
                "seconds_per_token": self.seconds_per_token,
                "total_s": self.total_s,
            },
        }
        return told | ({"prompt_logprobs": [plain(e) for e in self.prompt_logprobs]} if self.prompt_logprobs else {})

    def as_dict(self) -> dict[str, Any]:
        """For `--json`, with the first choice."""
        return {"request_id": self.request_id, **self.choices[0].as_dict(), **self.about()}


class Client:
    """A connection to one gateway; an async context manager."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
        # The generated stubs are untyped: their calls are typed here, once.
        self._inference: Any = inference_pb2_grpc.InferenceStub(self._channel)
        self._fleet: Any = fleet_pb2_grpc.FleetStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def responses(
        self, request: inference_pb2.GenerateRequest, *, timeout: float | None = None
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """The stream of one Generate call. Leaving it early cancels the call.

        Raises:
            grpc.aio.AioRpcError: as the service says.
        """
        call = self._inference.Generate(request, timeout=timeout)
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
    ) -> Answer:
        """One whole answer; `on_text` gets the text of its first choice as it comes, `on_response` each response with
        the answer so far.

        Raises:
            grpc.aio.AioRpcError: as the service says.
            BrokenStream: the stream broke the service's promises.
        """
        answer = Answer(request_id=request.request_id, n=max(request.n, 1))
        started = time.monotonic()
        async for response in self.responses(request, timeout=timeout):
            text = answer.add(response, time.monotonic() - started)
            if text and on_text is not None:
                on_text(text)
            if on_response is not None:
                on_response(response, answer)
        answer.end(time.monotonic() - started)
        return answer

    async def cancel(self, request_id: str) -> bool:
        """True when this call ended a live job."""
        request = inference_pb2.CancelRequest(request_id=request_id)
        response = await self._inference.Cancel(request, timeout=ASK_TIMEOUT_S)
        return bool(response.cancelled)

    async def model(self, name: str = "") -> inference_pb2.Model:
        """The model served; `name` may be empty where there is one only."""
        request = inference_pb2.GetModelRequest(name=name)
        model: inference_pb2.Model = await self._inference.GetModel(request, timeout=ASK_TIMEOUT_S)
        return model

    async def serves(self) -> bool:
        """Whether the gateway says that answers can be had: it holds its lease, and a live worker serves."""
        request = health_pb2.HealthCheckRequest(service=INFERENCE)
        response = await self._health.Check(request, timeout=ASK_TIMEOUT_S)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def workers(self) -> list[fleet_pb2.Worker]:
        """The live workers, by id."""
        response = await self._fleet.ListWorkers(fleet_pb2.ListWorkersRequest(), timeout=ASK_TIMEOUT_S)
        return sorted(response.workers, key=lambda worker: str(worker.id))

    async def queues(self) -> list[fleet_pb2.Queue]:
        """Every worker's queue, by worker."""
        response = await self._fleet.GetQueues(fleet_pb2.GetQueuesRequest(), timeout=ASK_TIMEOUT_S)
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


def plain(message: Any) -> dict[str, Any]:
    """A protobuf message as a dict: the .proto's field names, every field present, 64-bit numbers as numbers."""
    fields = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    wide = {f.name for f in message.DESCRIPTOR.fields if f.cpp_type in (f.CPPTYPE_INT64, f.CPPTYPE_UINT64)}
    return {name: int(value) if name in wide else value for name, value in fields.items()}


class Failed(Protocol):
    """The error of a call, by either of the library's two interfaces."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...


def describe(error: Failed) -> str:
    """One line for people: `UNAVAILABLE: no live worker`."""
    # The library's own words, which name neither the cause nor the cure.
    details = error.details() or "no details"
    if "failed to connect" in details:
        return f"UNAVAILABLE: nothing answers there; is `octavo up` running, and is --target right? ({details})"
    if details.startswith(("DNS resolution failed", "errors resolving")):
        return f"UNAVAILABLE: no machine has that name; is --target right? ({details})"
    if details == "Deadline Exceeded":
        return "DEADLINE_EXCEEDED: the gateway did not answer in time; is it overloaded, or stopped?"
    return f"{error.code().name}: {details}"
