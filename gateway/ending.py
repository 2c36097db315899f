"""Ends the job of a caller who has gone, and no other one's."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gateway.errors import JobLost
from gateway.pauses import pauses
from kvstore.errors import BrokerError
from octavo.v1 import inference_pb2, job_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.relay import Relay
    from gateway.stream import Stream
    from kvstore.jobs import Jobs

logger = logging.getLogger(__name__)

MAX_WAITING: Final = 10_000
"""Jobs that may wait to be ended until the broker answers again. What they hold is bounded by this alone."""
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


class Endings:
    """Ends jobs on behalf of one gateway, for as long as it lives: nobody else would, before it has died."""

    def __init__(self, jobs: Jobs, relay: Relay) -> None:
        self._jobs = jobs
        self._relay = relay
        self._waiting = 0

    async def end(self, left: Left) -> None:
        """Ends the job of a call, unless it was never accepted or another call waits for it, or has asked for it since.
        Where the broker does not answer, waits until it does."""
        if not await _accepted(left):
            return
        request_id = left.stream.request_id
        try:
            await self._end(left)
        except BrokerError as error:
            if self._waiting >= MAX_WAITING:
                logger.error(
                    "job %s runs on for nobody: %d others wait to be ended: %s", request_id, MAX_WAITING, error
                )
                return
            logger.info("job %s is to be ended once the broker answers: %s", request_id, error)
            self._waiting += 1
            try:
                await self._end_some_time(left)
            finally:
                self._waiting -= 1

    async def _end_some_time(self, left: Left) -> None:
        waits = pauses()
        while True:
            await asyncio.sleep(next(waits))
            with suppress(BrokerError):
                await self._end(left)
                return

    async def _end(self, left: Left) -> None:
        stream = left.stream
        if self._relay.bequeath(stream):
            return
        if left.returning:
            # Who comes back finds the job. From then on it is the new call's, and what follows here does nothing.
            # Nobody can while the broker does not answer, so the time for it begins once it does.
            await self._jobs.get(stream.request_id)
            await asyncio.sleep(RETURN_S)
            if self._relay.bequeath(stream):
                return
        # One of these asked for the job last, or else it belongs to a call that came later.
        for caller in tuple(stream.callers):
            await _finish(self._jobs, stream.request_id, caller, late=left.late)


async def _accepted(left: Left) -> bool:
    """Whether there may be a job."""
    try:
        return await left.submission is not None  # None: there was nothing to attach to
    except (BrokerError, JobLost) as error:
        if not left.asked():
            return False
        logger.info("whether job %s was accepted is unknown: %s", left.stream.request_id, error)
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
