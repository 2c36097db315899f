"""Sends requests from this one process, `concurrency` at a time, and notes what its user would have seen."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import grpc.aio

from bench.stats import Level, Sample, summarise
from ops.client import BrokenStream, describe
from ops.tasks import all_or_first_error

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from octavo.v1 import inference_pb2
    from ops.client import Client

TIMEOUT_S = 600.0
"""Deadline of one request: a run ends by itself, whatever the server does."""


async def measure(
    client: Client, requests: Sequence[inference_pb2.GenerateRequest], concurrency: int
) -> tuple[Level, list[Sample]]:
    """Sends all requests, in order, each as soon as one of `concurrency` places is free."""
    waiting = iter(enumerate(requests))
    samples: dict[int, Sample] = {}
    started = time.monotonic()
    await all_or_first_error(_user(client, waiting, samples) for _ in range(min(concurrency, len(requests))))
    wall_s = time.monotonic() - started
    in_order = [samples[index] for index in range(len(requests))]
    return summarise(concurrency, in_order, wall_s), in_order


async def warm_up(client: Client, requests: Sequence[inference_pb2.GenerateRequest]) -> None:
    """Sends all requests at once, so that allocators, threads and kernels have seen such a batch.

    Raises:
        grpc.aio.AioRpcError: the server does not serve them.
    """
    await asyncio.gather(*(client.generate(request, timeout=TIMEOUT_S) for request in requests))


async def _user(
    client: Client, waiting: Iterator[tuple[int, inference_pb2.GenerateRequest]], samples: dict[int, Sample]
) -> None:
    """One place: asks, reads the answer to its end, asks again."""
    for index, request in waiting:
        samples[index] = await _ask(client, request)


async def _ask(client: Client, request: inference_pb2.GenerateRequest) -> Sample:
    started = time.monotonic()
    try:
        answer = await client.generate(request, timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        return Sample(total_s=time.monotonic() - started, error=describe(error))
    except BrokenStream as error:
        return Sample(total_s=time.monotonic() - started, error=f"broken stream: {error}")
    usage = answer.usage
    return Sample(
        prompt_tokens=usage.prompt_tokens if usage else 0,
        cached_tokens=usage.cached_tokens if usage else 0,
        output_tokens=len(answer.token_ids),
        first_token_s=answer.first_token_s,
        seconds_per_token=answer.seconds_per_token,
        total_s=answer.total_s or 0.0,
    )
