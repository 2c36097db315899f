"""What a call brought and how it ended, as a history has it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from bench.chaos.history import Came, Ended, Used
from bench.chaos.retry_info import retry_after_ms
from octavo.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

    import grpc.aio


def brought(request_id: str, call: int, response: inference_pb2.GenerateResponse) -> Iterator[Came | Used]:
    """A response that came now."""
    now = time.monotonic()
    for chunk in response.chunks:
        finish = inference_pb2.FinishReason.Name(chunk.finish) if chunk.finish else ""
        told = (chunk.choice, chunk.start, tuple(chunk.token_ids), chunk.text, finish, chunk.error)
        yield Came(request_id, call, now, *told)
    if response.HasField("usage"):
        usage = response.usage
        counts = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, usage.attempts)
        yield Used(request_id, call, now, *counts)


def ended_by(request_id: str, call: int, error: grpc.aio.AioRpcError) -> Ended:
    """A call that ended with an error now."""
    told = retry_after_ms(error.trailing_metadata())
    return Ended(request_id, call, time.monotonic(), error.code().name, error.details() or "", told)
