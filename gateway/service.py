"""The Inference service: one call from its arrival to its last response."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any, Final

import grpc.aio

from gateway import admission
from gateway.chats import messages_of, tools_of
from gateway.dispatch import Order
from gateway.errors import Draining, JobNotFound, Overloaded, lookup
from gateway.metrics import Call
from gateway.output import Asked, Output, deadline_passed
from gateway.responses import digest_of, seed_of
from gateway.rpc import Method, service_handler
from kvstore.jobs import Finished
from kvstore.submissions import calls_of
from kvstore.tenants import job_name
from octavo.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from gateway.auth import Caller, Doorman
    from gateway.metrics import Metrics
    from gateway.models import Models, Served
    from gateway.relay import Relay
    from gateway.rpc import Context
    from gateway.structures import Structures
    from gateway.tokenize import TokenizerPool
    from kvstore.jobs import Jobs

SERVICE: Final = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
NAME: Final = SERVICE.full_name


class InferenceService:
    """Serves Generate, Attach, Cancel and GetModel on behalf of one gateway."""

    def __init__(
        self,
        *,
        models: Models,
        tokenizers: TokenizerPool,
        structures: Structures,
        output: Output,
        relay: Relay,
        jobs: Jobs,
        metrics: Metrics,
        max_streams: int,
        doorman: Doorman,
    ) -> None:
        self._models = models
        self._tokenizers = tokenizers
        self._structures = structures
        self._output = output
        self._relay = relay
        self._jobs = jobs
        self._metrics = metrics
        self._max_streams = max_streams
        self._doorman = doorman
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    def handler(self) -> grpc.GenericRpcHandler:
        """What the server registers."""
        methods = {
            "Generate": Method(inference_pb2.GenerateRequest, self.generate),
            "Attach": Method(inference_pb2.AttachRequest, self.attach),
            "Cancel": Method(inference_pb2.CancelRequest, self.cancel),
            "GetModel": Method(inference_pb2.GetModelRequest, self.get_model),
        }
        return service_handler(SERVICE, methods, self._doorman)

    async def drain(self) -> None:
        """Refuses new Generate and Attach calls from now on; returns when none is open."""
        self._draining = True
        await self._idle.wait()

    async def cancel(
        self, request: inference_pb2.CancelRequest, _context: Context, caller: Caller
    ) -> inference_pb2.CancelResponse:
        """Ends a job of the caller's tenant, whoever waits for it; or, for a caller who leaves, one that is that
        caller's and that nobody else reads here."""
        admission.check_request_id(request.request_id)
        admission.check_caller(request.caller)
        name, leaver = job_name(caller.tenant, request.request_id), None
        if request.caller:
            leaver = await self._relay.leave(name, calls_of(request.caller))
            if leaver is None:
                return inference_pb2.CancelResponse(cancelled=False)
        finished = await self._jobs.cancel(name, caller=leaver)
        return inference_pb2.CancelResponse(cancelled=finished is Finished.ENDED)

    async def get_model(
        self, request: inference_pb2.GetModelRequest, _context: Context, _caller: Caller
    ) -> inference_pb2.Model:
        """What is served under a name, with the limits that hold on every worker."""
        served = await self._models.find(request.name, now=True)
        return inference_pb2.Model(
            name=served.name,
            fingerprint=served.fingerprint,
            context_length=served.context_length,
            block_size=served.workers[0].block_size,
            vocab_size=served.vocab_size,
            dtype=served.workers[0].dtype,
            workers=len(served.workers),
        )

    async def generate(self, request: inference_pb2.GenerateRequest, context: Context, caller: Caller) -> None:
        """Serves one Generate call, and counts how it ended."""
        await self._counted(context, lambda call: self._generate(request, context, call, caller))

    async def attach(self, request: inference_pb2.AttachRequest, context: Context, caller: Caller) -> None:
        """Serves one Attach call, and counts how it ended."""
        await self._counted(context, lambda call: self._attach(request, context, call, caller))

    async def _counted(self, context: Context, serve: Callable[[Call], Awaitable[str]]) -> None:
        """Serves a call that streams.

        A coroutine that writes, not a generator that yields: grpc cancels the task of a call, and a generator that is
        suspended in a yield would not notice.
        """
        call = Call(self._metrics, context)
        self._open += 1
        self._idle.clear()
        outcome = "internal"
        try:
            if self._draining:
                raise Draining("the gateway is stopping; call another one")
            if self._open > self._max_streams:
                raise Overloaded(f"this gateway has {self._max_streams} open streams, its limit; try again later")
            outcome = await serve(call)
        except asyncio.CancelledError:
            outcome = "deadline_exceeded" if deadline_passed(context) else "cancelled"
            raise
        except grpc.aio.BaseError:
            outcome = "cancelled"
            raise
        except Exception as error:
            known = lookup(error)
            outcome = known.code.name.lower() if known else outcome
            raise
        finally:
            call.end(outcome)
            self._open -= 1
            if not self._open:
                self._idle.set()

    async def _generate(
        self, request: inference_pb2.GenerateRequest, context: Context, call: Call, caller: Caller
    ) -> str:
        admission.check(request)
        caller.check_priority(request.priority)
        name = job_name(caller.tenant, request.request_id or uuid.uuid4().hex)
        digest = digest_of(request)
        # In the relay's books before the broker has the job: no delivery can be missed.
        with self._relay.open(name, admission.choices(request), caller=request.caller) as stream:

            async def make() -> Order:
                order = await self._order(request, name, digest, stream.caller, context, call)
                order.quota = caller.quota
                return order

            asked = Asked(stream, context, call, request.detached, make, request.model)
            if request.request_id:
                # Before the fleet is asked: a job may outlive its worker's readiness, and its output the worker.
                outcome = await self._output.attached(asked, digest)
                if outcome is not None:
                    return outcome
            return await self._output.submitted(asked)

    async def _attach(self, request: inference_pb2.AttachRequest, context: Context, call: Call, caller: Caller) -> str:
        admission.check_request_id(request.request_id)
        admission.check_caller(request.caller)
        name = job_name(caller.tenant, request.request_id)
        record = await self._jobs.get(name)
        if record is None:
            raise JobNotFound(request.request_id)
        admission.check_after(request.after, record)
        choices = len(record.next)
        with self._relay.open(name, choices, request.after, caller=request.caller) as stream:
            # Nobody's leaving ends a detached one, so it may as well be read as fast as can be.
            watches = request.watch and not record.detached
            asked = Asked(stream, context, call, record.detached or watches, watches=watches)
            outcome = await self._output.attached(asked, None)
            if outcome is None:  # its retention ended meanwhile
                raise JobNotFound(request.request_id)
            return outcome

    async def _order(
        self,
        request: inference_pb2.GenerateRequest,
        name: str,
        digest: bytes,
        caller: str,
        context: Context,
        call: Call,
    ) -> Order:
        """What to submit. The same at every gateway and every time, while the model's limits are the same."""
        served = await self._models.find(request.model)
        call.model = served.name
        if request.HasField("structure"):
            await self._structures.check(request.structure)
        call.lap("check")
        job = admission.resolve(
            request,
            request_id=name,
            model=served.name,
            prompt=await self._tokenize(request, served),
            limits=admission.Limits(served.context_length, served.vocab_size),
            seed=seed_of(name, digest),
        )
        call.lap("tokenize")
        remaining_s = (lambda: None) if request.detached else context.time_remaining
        return Order(job, digest, remaining_s, caller)

    async def _tokenize(self, request: inference_pb2.GenerateRequest, served: Served) -> Sequence[int]:
        match request.WhichOneof("input"):
            case "text":
                return await self._tokenizers.text(served.tokenizer, request.text, served.context_length)
            case "chat":
                messages, tools = await self._read(request.chat)
                return await self._tokenizers.chat(served.tokenizer, messages, served.context_length, tools)
            case _:
                return request.token_ids.ids  # not copied: it may be a million ids that will be refused

    async def _read(self, chat: inference_pb2.Chat) -> tuple[Sequence[Mapping[str, Any]], Sequence[Any]]:
        """Messages and tools as templates take them. Those with JSON in them, which may be megabytes, by a thread."""

        def read() -> tuple[Sequence[Mapping[str, Any]], Sequence[Any]]:
            return messages_of(chat), tools_of(chat)

        has_json = chat.tools or any(message.tool_calls for message in chat.messages)
        return await self._tokenizers.run(read) if has_json else read()
