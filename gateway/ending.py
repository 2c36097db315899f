"""Ends the job of a caller who has gone, and no other one's."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gateway.errors import JobLost
from kvstore.errors import BrokerError
from octavo.v1 import inference_pb2, job_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.relay import Relay
    from gateway.stream import Stream
    from kvstore.jobs import Jobs

logger = logging.getLogger(__name__)

PATIENCE_S: Final = 60.0
"""How long this is tried while the broker does not answer."""
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


async def end_job(jobs: Jobs, relay: Relay, left: Left) -> None:
    """Ends the job of a call, unless it was never accepted or another call waits for it, or has asked for it since."""
    if not await _accepted(left):
        return
    stream = left.stream
    until = time.monotonic() + PATIENCE_S
    pause = 0.1
    while not relay.bequeath(stream):
        try:
            if left.returning:
                # Who comes back finds the job. From then on it is the new call's, and what follows here does nothing.
                # Nobody can while the broker does not answer, so the time for it begins once it does.
                await jobs.get(stream.request_id)
                await asyncio.sleep(RETURN_S)
                if relay.bequeath(stream):
                    return
            # One of these asked for the job last, or else it belongs to a call that came later.
            for caller in tuple(stream.callers):
                await _finish(jobs, stream.request_id, caller, late=left.late)
            return
        except BrokerError as error:
            if time.monotonic() > until:
                logger.error("job %s could not be ended: %s", stream.request_id, error)
                return
        await asyncio.sleep(pause)
        pause = min(2 * pause, 2.0)


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
