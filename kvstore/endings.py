"""Ending a job from outside of its worker."""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING

from kvstore.keys import GROUP
from kvstore.ledger import outcome
from kvstore.logs import about
from kvstore.records import Finished
from kvstore.token_log import encode_terminal
from octavo.v1 import inference_pb2, job_pb2

if TYPE_CHECKING:
    from kvstore.client import Broker

logger = logging.getLogger(__name__)


async def finish(
    broker: Broker,
    request_id: str,
    *,
    retention_ms: int,
    finish: inference_pb2.FinishReason,
    failure: job_pb2.Failure,
    error: str,
    expect_attempt: int | None,
    expect_gateway: str | None,
    expect_caller: str | None,
) -> Finished:
    """See ``Jobs.finish``."""
    keys = broker.keys
    abandoned = finish == inference_pb2.CANCELLED and expect_caller is not None
    answer = await broker.script(
        "finish",
        [keys.job(request_id), keys.log(request_id)],
        [
            *(GROUP, keys.prefix, retention_ms, int(finish)),
            encode_terminal(request_id, finish, failure, error, abandoned=abandoned),
            "" if expect_attempt is None else expect_attempt,
            "" if expect_gateway is None else expect_gateway,
            secrets.token_hex(8),
            expect_caller or "",
            outcome(finish, failure),
        ],
    )
    return Finished(answer.decode())


async def end_damaged(
    broker: Broker, request_id: str, reason: str, *, retention_ms: int, expect_attempt: int | None = None
) -> None:
    """Ends a job that isn't as we write them. ``reason``: what is wrong with it. With an ``expect_attempt``, only if
    that is the one that runs."""
    broker.malformed += 1
    ended = await finish(
        broker,
        request_id,
        retention_ms=retention_ms,
        finish=inference_pb2.ERROR,
        failure=job_pb2.FAILURE_INTERNAL,
        error=f"the job in the broker is damaged: {reason}",
        expect_attempt=expect_attempt,
        expect_gateway=None,
        expect_caller=None,
    )
    if ended is Finished.ENDED:
        logger.warning("job %s ended: %s", request_id, reason, extra=about(request_id))
