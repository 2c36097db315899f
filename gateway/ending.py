"""Ends the job of a caller who has gone, and no other one's."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gateway.errors import JobLost
from gateway.pauses import pauses
from kvstore.errors import BrokerError
from kvstore.logs import about
from octavo.v1 import inference_pb2, job_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.relay import Relay
    from gateway.stream import Stream
    from gateway.tasks import Tasks
    from kvstore.jobs import Jobs

logger = logging.getLogger(__name__)

MAX_WAITING: Final = 10_000
"""Jobs that may wait to be ended until the broker answers again."""
RETURN_S: Final = 10.0
"""How long a caller who was told to try again has for it, before a job that may have been accepted is ended."""


@dataclass(frozen=True, slots=True)
class Left:
    """A call that has ended before its job."""

    stream: Stream
    submission: asyncio.Task[Any]
    """What submits or attaches; it may be under way still. None: there was nothing to attach to."""
    asked: Callable[[], bool]
    """Whether the broker may have done what it was asked for, when `submission` has failed on it."""
    late: bool
    """The client's deadline has passed."""
    returning: bool
    """The caller was told to try again."""


@dataclass(slots=True)
class Gone:
    """What is kept of such calls for one job. A whole call, with its request and its output, hangs on a Left."""

    request_id: str
    callers: dict[str, bool]
    """In whose names the job may be ended, and whether that one's deadline has passed."""
    returning: bool
    """One of them was told to try again."""


class Endings:
    """Ends jobs on behalf of one gateway, for as long as it lives: nobody else would, before it has died."""

    def __init__(self, jobs: Jobs, relay: Relay, tasks: Tasks) -> None:
        self._jobs = jobs
        self._relay = relay
        self._tasks = tasks
        self._waiting: dict[str, Gone] = {}
        self._trying: asyncio.Task[None] | None = None

    async def end(self, left: Left) -> None:
        """Ends the job of a call, unless it was never accepted or another call waits for it, or has asked for it since.
        Where the broker does not answer, that is done once it does."""
        if not await _accepted(left):
            return
        gone = Gone(left.stream.request_id, dict.fromkeys(left.stream.callers, left.late), left.returning)
        del left
        await self._end(gone, returning=gone.returning)

    async def _end(self, gone: Gone, *, returning: bool) -> bool:
        """Whether the broker answers. Who is returning gets the time for it first."""
        try:
            if self._relay.bequeath(gone.request_id, gone.callers):
                return True
            if returning:
                # Who comes back finds the job. From then on it is the new call's, and what follows here does nothing.
                # Nobody can while the broker does not answer, so the time for it begins once it does.
                await self._jobs.get(gone.request_id)
                self._tasks.spawn(self._end_later(gone), name=f"end {gone.request_id}")
                return True
            # One of these asked for the job last, or else it belongs to a call that came later.
            for caller, late in gone.callers.items():
                await _finish(self._jobs, gone.request_id, caller, late=late)
        except BrokerError as error:
            self._put_off(gone, error)
            return False
        return True

    async def _end_later(self, gone: Gone) -> None:
        await asyncio.sleep(RETURN_S)
        await self._end(gone, returning=False)

    def _put_off(self, gone: Gone, error: BrokerError) -> None:
        """Until the broker answers."""
        request_id = gone.request_id
        if (other := self._waiting.get(request_id)) is not None:
            other.callers |= gone.callers
            other.returning |= gone.returning
        elif len(self._waiting) >= MAX_WAITING:
            logger.error(
                "job %s runs on for nobody: %d others wait to be ended: %s",
                *(request_id, MAX_WAITING, error),
                extra=about(request_id),
            )
        else:
            logger.info("job %s is to be ended once the broker answers: %s", request_id, error, extra=about(request_id))
            self._waiting[request_id] = gone
        if self._trying is None or self._trying.done():
            self._trying = self._tasks.spawn(self._try_again(), name="end what waits")

    async def _try_again(self) -> None:
        """Ends all that wait, one after the other: when the broker is back, leases and calls come first."""
        waits = pauses()
        pause = next(waits)
        while self._waiting:
            await asyncio.sleep(pause)
            gone = self._waiting.pop(next(iter(self._waiting)))
            if await self._end(gone, returning=gone.returning):
                waits, pause = pauses(), 0.0
            else:
                pause = next(waits)


async def _accepted(left: Left) -> bool:
    """Whether there may be a job."""
    try:
        return await left.submission is not None  # None: there was nothing to attach to
    except (BrokerError, JobLost) as error:
        if not left.asked():
            return False
        request_id = left.stream.request_id
        logger.info("whether job %s was accepted is unknown: %s", request_id, error, extra=about(request_id))
        return True
    except Exception:
        return False  # refused: there is no job of ours


async def _finish(jobs: Jobs, request_id: str, caller: str, *, late: bool) -> None:
    if not late:
        await jobs.cancel(request_id, caller=caller)
        return
    await jobs.finish(
        request_id,
        finish=inference_pb2.ERROR,
        failure=job_pb2.FAILURE_DEADLINE,
        error="the client's deadline passed",
        expect_caller=caller,
    )
