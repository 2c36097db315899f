"""The Inference service: one call from its arrival to its last response."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import grpc.aio

from gateway import admission
from gateway.dispatch import Order
from gateway.ending import Left, end_job
from gateway.errors import Draining, JobFailed, JobLost, Overloaded, lookup
from gateway.metrics import Call
from gateway.responses import digest_of, most_tokens, response_of
from gateway.rpc import Method, service_handler
from kvstore.errors import BrokerError
from kvstore.jobs import Finished, Submitted
from octavo.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

    from gateway.dispatch import Dispatch, Sent
    from gateway.metrics import Metrics
    from gateway.models import Models, Served
    from gateway.relay import Relay, Stream
    from gateway.rpc import Context
    from gateway.tasks import Tasks
    from gateway.tokenize import TokenizerPool
    from kvstore.jobs import Jobs
    from octavo.v1 import job_pb2

T = TypeVar("T")

SERVICE: Final = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
NAME: Final = SERVICE.full_name
REQUEST_ID_KEY: Final = "octavo-request-id"
"""Initial metadata of Generate: the request's id, known to the client before there is any output."""
DEADLINE_SLACK_S: Final = 0.05
"""A call that is cancelled this close to its deadline was cancelled by it: the two clocks differ a little."""


class InferenceService:
    """Serves Generate, Cancel and GetModel on behalf of one gateway."""

    def __init__(
        self,
        *,
        models: Models,
        tokenizers: TokenizerPool,
        dispatch: Dispatch,
        relay: Relay,
        jobs: Jobs,
        tasks: Tasks,
        metrics: Metrics,
        max_streams: int,
    ) -> None:
        self._models = models
        self._tokenizers = tokenizers
        self._dispatch = dispatch
        self._relay = relay
        self._jobs = jobs
        self._tasks = tasks
        self._metrics = metrics
        self._max_streams = max_streams
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    def handler(self) -> grpc.GenericRpcHandler:
        """What the server registers."""
        methods = {
            "Generate": Method(inference_pb2.GenerateRequest, self.generate),
            "Cancel": Method(inference_pb2.CancelRequest, self.cancel),
            "GetModel": Method(inference_pb2.GetModelRequest, self.get_model),
        }
        return service_handler(SERVICE, methods)

    async def drain(self) -> None:
        """Refuses new Generate calls from now on; returns when none is open."""
        self._draining = True
        await self._idle.wait()

    async def cancel(self, request: inference_pb2.CancelRequest, _context: Context) -> inference_pb2.CancelResponse:
        """Ends a job, whoever waits for it."""
        admission.check_request_id(request.request_id)
        finished = await self._jobs.cancel(request.request_id)
        return inference_pb2.CancelResponse(cancelled=finished is Finished.ENDED)

    async def get_model(self, request: inference_pb2.GetModelRequest, _context: Context) -> inference_pb2.Model:
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

    async def generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        """Serves one Generate call, and counts how it ended.

        A coroutine that writes, not a generator that yields: grpc cancels the task of a call, and a generator that is
        suspended in a yield would not notice.
        """
        call = Call(self._metrics)
        self._open += 1
        self._idle.clear()
        outcome = "internal"
        try:
            outcome = await self._generate(request, context, call)
        except asyncio.CancelledError:
            outcome = "deadline_exceeded" if _deadline_passed(context) else "cancelled"
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

    async def _generate(self, request: inference_pb2.GenerateRequest, context: Context, call: Call) -> str:
        if self._draining:
            raise Draining("the gateway is stopping; call another one")
        if self._open > self._max_streams:
            raise Overloaded(f"this gateway has {self._max_streams} open streams, its limit; try again later")
        admission.check(request)
        request_id = request.request_id or uuid.uuid4().hex
        digest = digest_of(request)
        # In the relay's books before the broker has the job: no delivery can be missed.
        with self._relay.open(request_id, admission.choices(request)) as stream:
            if request.request_id:
                # Before the fleet is asked: a job may outlive its worker's readiness, and its output the worker.
                asking = self._dispatch.attach(request_id, digest, stream.caller)
                async with self._sending(stream, context, asking) as attached:
                    if attached is not None:
                        call.model = request.model
                        return await self._answer(stream, attached, context, call)
            served = await self._models.find(request.model)
            call.model = served.name
            call.lap("check")
            job = admission.resolve(
                request,
                request_id=request_id,
                model=served.name,
                prompt=await self._tokenize(request, served),
                limits=admission.Limits(served.context_length, served.vocab_size),
                seed=secrets.randbits(64),
            )
            call.lap("tokenize")
            order = Order(job, digest, context.time_remaining, stream.caller)
            sending = self._dispatch.submit(order, served)
            async with self._sending(stream, context, sending, lambda: order.offered) as sent:
                call.lap("send")
                return await self._answer(stream, sent, context, call)

    @asynccontextmanager
    async def _sending(
        self, stream: Stream, context: Context, work: Coroutine[Any, Any, T], asked: Callable[[], bool] = lambda: True
    ) -> AsyncIterator[T]:
        """What `work`, which submits or attaches, gives. A caller who leaves, then or later, leaves no job behind.

        `asked`: whether the broker may have done what it was asked for, when `work` has failed on it.
        """
        submission = self._tasks.spawn(work, name=f"submit {stream.request_id}", awaited=True)
        try:
            # Shielded: a submission that is cut off half-way could reach the broker after its own cancellation.
            yield await asyncio.shield(submission)
        except (JobLost, Draining):
            raise  # the client is told that the job may go on
        except BaseException as error:
            # Once the relay is closed the gateway cuts its callers off itself, and another one may go on.
            if not (stream.ended or self._relay.closed):
                left = Left(
                    stream,
                    submission,
                    asked,
                    late=_deadline_passed(context),
                    returning=isinstance(error, BrokerError),
                )
                self._tasks.spawn(end_job(self._jobs, self._relay, left), name=f"end {stream.request_id}")
            raise
        finally:
            submission.add_done_callback(self._let_go)  # it may be on its way still

    def _let_go(self, submission: asyncio.Task[Any]) -> None:
        """The call of a submission is over: what was expected of its worker's cache is no more."""
        if not submission.cancelled() and submission.exception() is None and submission.result() is not None:
            self._dispatch.forget(submission.result())

    async def _tokenize(self, request: inference_pb2.GenerateRequest, served: Served) -> Sequence[int]:
        match request.WhichOneof("input"):
            case "text":
                return await self._tokenizers.text(served.tokenizer, request.text, served.context_length)
            case "chat":
                messages = [(message.role, message.content) for message in request.chat.messages]
                return await self._tokenizers.chat(served.tokenizer, messages, served.context_length)
            case _:
                return request.token_ids.ids  # not copied: it may be a million ids that will be refused

    async def _answer(self, stream: Stream, sent: Sent, context: Context, call: Call) -> str:
        """Writes the job's output as it comes; the outcome: how the last choice ended. Raises JobFailed after all
        terminal chunks when one of them says ERROR."""
        stream.attached = True
        call.replay = sent.submitted is Submitted.ATTACHED
        if call.replay:
            stream.distrust()
        await context.send_initial_metadata(((REQUEST_ID_KEY, stream.request_id),))
        failed: job_pb2.Delivery | None = None
        while True:
            batch = await stream.next()
            done = stream.done
            response = response_of(stream.request_id, batch, sent, stream.usage if done else None)
            if response.HasField("route"):
                self._dispatch.forget(sent)
                call.routed(response.route, sent.worker)
            call.output(most_tokens(response.chunks), stream.heard(batch[-1]))
            await context.write(response)
            failed = failed or next((each for each in batch if each.chunk.finish == inference_pb2.ERROR), None)
            if done:
                if failed is not None:
                    raise JobFailed(failed.failure, failed.chunk.error)
                if not call.replay and batch[-1].chunk.finish in (inference_pb2.STOP, inference_pb2.LENGTH):
                    self._dispatch.answers.learn(call.model, stream.usage.completion_tokens / stream.choices)
                return inference_pb2.FinishReason.Name(batch[-1].chunk.finish).lower()


def _deadline_passed(context: Context) -> bool:
    remaining: Callable[[], float | None] = context.time_remaining
    left = remaining()
    return left is not None and left <= DEADLINE_SLACK_S
