"""A job's way to its caller: asked for, answered from, and asked for again when the broker has lost it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from gateway.dispatch import Sent
from gateway.ending import Endings, Left
from gateway.errors import Draining, JobDiffers, JobFailed, JobGone, JobLost
from gateway.responses import BY_ITSELF, most_tokens, response_of
from gateway.resubmission import Resubmission
from kvstore.errors import BrokerError
from kvstore.jobs import Submitted
from kvstore.tenants import request_id_of
from octavo.v1 import inference_pb2, job_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

    from gateway.dispatch import Dispatch, Order
    from gateway.metrics import Call, Metrics
    from gateway.models import Models
    from gateway.relay import Relay
    from gateway.rpc import Context
    from gateway.stream import Stream
    from gateway.tasks import Tasks
    from kvstore.jobs import Jobs

T = TypeVar("T")

REQUEST_ID_KEY: Final = "octavo-request-id"
"""Initial metadata of Generate and Attach: the request's id, known to the client before there is any output."""
DEADLINE_SLACK_S: Final = 0.05
"""A call that is cancelled this close to its deadline was cancelled by it: the two clocks differ a little."""
MAX_RESTARTS: Final = 3
"""How often a job is submitted again that the broker has lost."""


@dataclass(slots=True)
class Asked:
    """One call of a client, for one job."""

    stream: Stream
    context: Context
    call: Call
    detached: bool = False
    """The job is not to end with the call."""
    make: Callable[[], Awaitable[Order]] | None = None
    """What to submit, made from what the client said, however often it is asked for. None: the call does not say it."""
    model: str = ""
    """As the client names it."""
    order: Order | None = None
    """What it made, once it has."""
    left: bool = False
    """Nobody waits any more."""
    failed: job_pb2.Delivery | None = None
    """The first choice that ended with ERROR."""
    ran_by: str = ""
    """Incarnation that began the job in its present life, where that is known; another one may have gone on with it."""
    watches: bool = False
    """It only looks on: the job stays its own caller's, whoever that is."""

    async def ordered(self) -> Order:
        """Raises what `make` does; JobGone when there is none."""
        if self.order is None:
            if self.make is None:
                raise JobGone("the job is no longer in the broker")
            order, trace = await self.make(), self.call.trace
            # Whoever runs it goes on with this call's trace.
            order.job.traceparent, order.trace = trace.parent, trace
            trace.tell(request_id=order.job.request_id, prompt_tokens=len(order.job.prompt_token_ids))
            self.order = order
        return self.order

    def offered(self) -> bool:
        """Whether the broker may have the job from this call, though it has not said so."""
        return self.order is None or self.order.offered


class Output:
    """Asks for jobs and writes what comes of them, on behalf of one gateway."""

    def __init__(
        self, *, dispatch: Dispatch, models: Models, relay: Relay, jobs: Jobs, tasks: Tasks, metrics: Metrics
    ) -> None:
        self._dispatch = dispatch
        self._models = models
        self._relay = relay
        self._jobs = jobs
        self._tasks = tasks
        self._metrics = metrics
        self._resubmission = Resubmission(dispatch, models, relay, tasks)
        self._endings = Endings(jobs, relay, tasks)

    async def attached(self, asked: Asked, digest: bytes | None) -> str | None:
        """The outcome of a call whose job may be there; None: it is not. `digest`: None for any payload."""
        try:
            async with self._sending(asked, self._attach(asked, digest)) as sent:
                return None if sent is None else await self._answer(asked, sent)
        except JobGone:
            if asked.make is None:
                raise
        return await self._again(asked)

    async def _attach(self, asked: Asked, digest: bytes | None) -> Sent | None:
        stream = asked.stream
        if asked.watches:
            record = await self._jobs.get(stream.request_id)
            return None if record is None else Sent(Submitted.ATTACHED, record.worker, record.predicted)
        sent = await self._dispatch.attach(stream.request_id, digest, stream.caller)
        if sent is not None and asked.make is not None:
            asked.call.model = asked.model  # it was accepted under that name
            stream.fingerprint = sent.fingerprint
        return sent

    async def submitted(self, asked: Asked) -> str:
        """The outcome of a call whose job is not there yet."""
        order = await asked.ordered()
        served = await self._models.find(order.job.model)
        try:
            async with self._sending(asked, self._dispatch.submit(order, served)) as sent:
                asked.stream.fingerprint = sent.fingerprint
                asked.call.lap("send")
                return await self._answer(asked, sent)
        except JobGone:
            return await self._again(asked)

    async def _again(self, asked: Asked) -> str:
        """The outcome of a call whose job was lost."""
        while True:
            asked.stream.restart()
            self._metrics.resubmitted.inc()
            try:
                async with self._sending(asked, self._resubmission.submit(asked)) as sent:
                    return await self._answer(asked, sent)
            except JobGone:
                if asked.stream.restarts >= MAX_RESTARTS:
                    raise

    @asynccontextmanager
    async def _sending(self, asked: Asked, work: Coroutine[Any, Any, T]) -> AsyncIterator[T]:
        """What `work`, which submits or attaches, gives. A caller who leaves, then or later, leaves no job behind,
        unless that is what it wanted."""
        stream, context = asked.stream, asked.context
        submission = self._tasks.spawn(work, name=f"submit {stream.request_id}", awaited=True)
        try:
            # Shielded: a submission that is cut off half-way could reach the broker after its own cancellation.
            yield await asyncio.shield(submission)
        except (JobGone, Draining):
            raise  # there is none, or another gateway may go on with it
        except BaseException as error:
            asked.left = True
            # Once the relay is closed the gateway cuts its callers off itself, and another one may go on.
            if not (stream.ended or self._relay.closed or asked.detached):
                left = Left(
                    stream,
                    submission,
                    asked.offered,
                    late=deadline_passed(context),
                    returning=isinstance(error, (BrokerError, JobLost)) and not isinstance(error, JobDiffers),
                )
                self._tasks.spawn(
                    self._endings.end(left), name=f"end {stream.request_id}", request_id=stream.request_id
                )
            raise
        finally:
            submission.add_done_callback(self._let_go)  # it may be on its way still

    def _let_go(self, submission: asyncio.Task[Any]) -> None:
        """The call of a submission is over: what was expected of its worker's cache is no more."""
        if not submission.cancelled() and submission.exception() is None and submission.result() is not None:
            self._dispatch.over(submission.result())

    async def _answer(self, asked: Asked, sent: Sent) -> str:
        """Writes the job's output as it comes; the outcome: how the last choice ended. Raises JobFailed after all
        terminal chunks when one of them says ERROR."""
        stream, context, call = asked.stream, asked.context, asked.call
        stream.attached = not asked.watches
        call.replay = call.replay or stream.restarts > 0 or sent.submitted is Submitted.ATTACHED
        if call.replay:
            stream.distrust()
        if not stream.restarts:
            await context.send_initial_metadata(((REQUEST_ID_KEY, request_id_of(stream.request_id)),))
        asked.ran_by = ""
        stream.on_route(lambda route: self._began(asked, sent, route))
        choices = stream.choices if asked.make is None else 0  # who sent the request knows
        while True:
            batch = await stream.next()
            done = stream.done
            response = response_of(request_id_of(stream.request_id), batch, sent, stream.usage if done else None)
            response.choices, choices = choices, 0
            if response.HasField("route"):
                call.routed(response.route)
            call.output(most_tokens(response.chunks), stream.heard(batch[-1]))
            await context.write(response)
            failed = (each for each in batch if each.chunk.finish == inference_pb2.ERROR)
            asked.failed = asked.failed or next(failed, None)
            if done:
                finish = batch[-1].chunk.finish
                self._learn(asked, sent, finish)
                if asked.failed is not None:
                    raise JobFailed(asked.failed.failure, asked.failed.chunk.error)
                return inference_pb2.FinishReason.Name(finish).lower()

    def _began(self, asked: Asked, sent: Sent, route: inference_pb2.Route) -> None:
        """The job has its first token since it was sent, with this route: it need not be new to its reader."""
        if (route.worker or sent.worker) == sent.worker:
            asked.ran_by = sent.incarnation
            self._dispatch.began(sent)
        else:
            self._dispatch.forget(sent)

    def _learn(self, asked: Asked, sent: Sent, finish: inference_pb2.FinishReason) -> None:
        """What the end of a job says of answers, and of the worker that ran it."""
        stream = asked.stream
        if sent.submitted is not Submitted.ACCEPTED:
            return  # somebody else's, who learns from it
        if asked.failed is not None:
            if asked.failed.failure == job_pb2.FAILURE_INTERNAL:
                # Beside the call: its caller has waited for all that there is.
                self._tasks.spawn(
                    self._blame(stream.request_id, sent),
                    name=f"blame for {stream.request_id}",
                    request_id=stream.request_id,
                )
        elif finish in BY_ITSELF:
            alone = asked.ran_by if stream.usage.attempts == stream.restarts + 1 else ""
            self._dispatch.succeeded(asked.call.model, stream.usage.completion_tokens / stream.choices, alone)

    async def _blame(self, request_id: str, sent: Sent) -> None:
        """The job's last worker has failed; as far as is known any more, that is not the one that it was sent to."""
        incarnation = sent.incarnation
        with suppress(BrokerError):
            record = await self._jobs.get(request_id)
            incarnation = record.worker_incarnation if record is not None else incarnation
        self._dispatch.failed(incarnation)


def deadline_passed(context: Context) -> bool:
    """Whether the client's deadline has."""
    left = context.time_remaining()
    return left is not None and left <= DEADLINE_SLACK_S
