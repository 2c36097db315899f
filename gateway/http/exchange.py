"""One HTTP request with answers: its calls of the service, and what is sent of their responses."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from starlette.responses import Response

from gateway.errors import AdmissionError, status_of
from gateway.http.answers import Answers, Echo
from gateway.http.context import HttpContext
from gateway.http.problems import Failed, Problem, problem_of
from gateway.http.tool_calls import OPENING, OTHER_WAYS
from gateway.rpc import Method, guarded
from octavo.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import Receive, Scope, Send

    from gateway.auth import Caller, Doorman
    from gateway.http.bodies import Bodies
    from gateway.http.context import Metadata
    from gateway.http.translate import Wanted
    from gateway.models import Models, Served
    from gateway.service import InferenceService
    from gateway.tokenize import TokenizerPool

AT_ONCE: Final = 16
"""Prompts of one request that are asked for at the same time: a request with many is not to fill the queues alone, and
be refused for it."""
LARGE: Final = 64 * 1024
"""Bytes of a response from which on a thread makes JSON of it: the log-probabilities of a prompt may be megabytes."""
LINE_ENDS: Final = "\u0085\u2028\u2029"
"""Those of Unicode that JSON takes as they are. Many clients cut a stream into lines as Python's splitlines does."""
HEAD: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""Of a stream: whoever passes it on is not to collect it first."""


@dataclass(frozen=True, slots=True)
class Backend:
    """What answers come from."""

    service: InferenceService
    doorman: Doorman
    models: Models
    tokenizers: TokenizerPool
    bodies: Bodies


class Exchange(Response):
    """Answers as a stream or whole, whatever the request wanted. A client that leaves ends its calls."""

    def __init__(self, backend: Backend, wanted: Wanted, request_id: str, metadata: Metadata) -> None:
        """``request_id``: as the client names it; empty: the service makes one."""
        super().__init__()
        self._backend = backend
        self._wanted = wanted
        self._metadata = metadata
        self._answers = Answers(wanted, int(time.time()))
        self._answers.id = request_id
        self._answers.model = wanted.requests[0].model
        self._named = request_id
        self._begun = False
        self._large = False
        """Whether some response was."""

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        serving = asyncio.create_task(self._serve(), name="http answer")
        leaving = asyncio.create_task(_left(receive), name="http client")
        try:
            await asyncio.wait((serving, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            serving.cancel()
            leaving.cancel()
            # Its calls have to learn that they are over, even where this task is cancelled too.
            await asyncio.wait((serving, leaving))
        if not serving.cancelled():
            serving.result()

    async def _serve(self) -> None:
        try:
            await self._ask()
            self._check_end()
            if self._wanted.stream:
                await self._send_events([self._answers.last_event()], end=True)
            else:
                body = await self._backend.bodies.run(lambda: json_line(self._answers.whole()), large=self._large)
                await self._send_whole(200, body, {})
        except Failed as failed:
            await self._fail(failed.problem)
        except Exception as error:
            await self._fail(problem_of(status_of(error), chat=self._wanted.chat))

    async def _ask(self) -> None:
        """All that is asked for, a few prompts at a time. The first one that fails ends the others."""
        numbered = list(enumerate(self._wanted.requests))
        if len(numbered) == 1:
            await self._one(*numbered[0])
            return
        room = asyncio.Semaphore(AT_ONCE)

        async def in_turn(number: int, request: inference_pb2.GenerateRequest) -> None:
            async with room:
                await self._one(number, request)

        try:
            async with asyncio.TaskGroup() as group:
                for each in numbered:
                    group.create_task(in_turn(*each))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _one(self, number: int, request: inference_pb2.GenerateRequest) -> None:
        if self._named:
            request.request_id = self._named if len(self._wanted.requests) == 1 else f"{self._named}.{number}"
        context = HttpContext(self._metadata, partial(self._write, number), chat=self._wanted.chat)
        # The same way in as by gRPC, bytes and all: what is checked there is checked here.
        call = guarded(Method(inference_pb2.GenerateRequest, partial(self._generate, number)), self._backend.doorman)
        await call(request.SerializeToString(), context)

    async def _generate(
        self, number: int, request: inference_pb2.GenerateRequest, context: Any, caller: Caller
    ) -> None:
        wanted = self._wanted
        if wanted.echo or wanted.logprobs or wanted.tools or not request.model:
            served = await self._backend.models.find(request.model)
            self._answers.model = served.name
            self._answers.bytes_of = served.tokenizer.bytes
            if wanted.tools:
                served.tokenizer.check_tools()
                _check_calls(served)
            if wanted.echo:
                await self._prepare_echo(number, request, served)
        await self._backend.service.generate(request, context, caller)

    async def _prepare_echo(self, number: int, request: inference_pb2.GenerateRequest, served: Served) -> None:
        text, ids = request.text, request.token_ids.ids
        if request.WhichOneof("input") == "token_ids":
            self._known(ids, served)
            text = await self._backend.bodies.run(lambda: served.tokenizer.decode(ids), large=len(ids) > LARGE // 16)
        elif self._wanted.logprobs:
            found = await self._backend.tokenizers.text(served.tokenizer, text, served.context_length)
            # What is told of the prompt's tokens begins with the second one.
            request.token_ids.ids.extend(found)
        first = request.token_ids.ids[0] if self._wanted.logprobs and request.token_ids.ids else None
        self._answers.echoes[number] = Echo(text, first)

    def _known(self, ids: Sequence[int], served: Served) -> None:
        if ids and max(ids) >= served.vocab_size:
            limit = f"must be below the vocabulary's size, {served.vocab_size}"
            raise AdmissionError("token_ids.ids", f"up to {max(ids)}", limit)
        if len(ids) > served.context_length:
            raise AdmissionError("prompt", f"{len(ids)} tokens", f"the context has {served.context_length}")

    async def _write(self, number: int, response: inference_pb2.GenerateResponse) -> None:
        answers = self._answers
        answers.id = answers.id or response.request_id
        if response.HasField("route"):
            answers.fingerprint = answers.fingerprint or self._backend.models.fingerprint_of(response.route.worker)

        def take() -> list[dict[str, Any]]:
            pieces = answers.take(number, response)
            if self._wanted.stream:
                return answers.events(pieces)
            answers.keep(pieces)
            return []

        large = response.ByteSize() > LARGE
        self._large = self._large or large
        events = await self._backend.bodies.run(take, large=large)
        if events:
            await self._send_events(events)

    def _check_end(self) -> None:
        """An answer that somebody cancelled is none that OpenAI's API could tell of."""
        cancelled = self._answers.cancelled
        if cancelled is not None and cancelled.abandoned:
            message = "the request was ended, as another caller of its id had left; ask again under another id"
            raise Failed(Problem(503, message, "server_error", code="abandoned"))
        if cancelled is not None:
            raise Failed(Problem(499, "the request was cancelled", "cancelled", code="cancelled"))

    async def _send_events(self, events: Sequence[dict[str, Any] | None], *, end: bool = False) -> None:
        if not self._begun:
            await self._start(200, {"content-type": "text/event-stream; charset=utf-8", **HEAD})
        data = b"".join(b"data: " + json_line(event) + b"\n\n" for event in events if event is not None)
        await self._send({"type": "http.response.body", "body": data + b"data: [DONE]\n\n" * end, "more_body": not end})

    async def _send_whole(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        size = {"content-length": str(len(body)), "content-type": "application/json"}
        await self._start(status, size | headers)
        await self._send({"type": "http.response.body", "body": body})

    async def _fail(self, problem: Problem) -> None:
        if not self._begun:
            await self._send_whole(problem.status, problem.body(), dict(problem.headers))
            return
        # Without [DONE]: so a reader sees that it has not all.
        data = b"data: " + problem.body() + b"\n\n"
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        self._begun = True
        if self._answers.id:
            headers["x-request-id"] = self._answers.id
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})


def _check_calls(served: Served) -> None:
    """Whether the model writes its calls in the way that is read here, as far as its template tells."""
    says = served.tokenizer.template_says
    if not says(OPENING) or any(map(says, OTHER_WAYS)):
        limit = "the model's template takes tools, but writes calls in a way that is not read here; leave them out"
        raise AdmissionError("chat.tools", "set", limit)


async def _left(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def json_line(value: Any) -> bytes:
    """JSON in one line, whatever a client's library takes for the end of one."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for end in LINE_ENDS:
        text = text.replace(end, f"\\u{ord(end):04x}")
    return text.encode()
