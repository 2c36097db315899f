"""Deliveries of one job, made in memory, and what tests look at of them."""

from __future__ import annotations

from gateway.place import Delivery
from octavo.v1.inference_pb2 import CANCELLED, STOP, Chunk
from octavo.v1.job_pb2 import FAILURE_UNAVAILABLE


def chunk(start: int, count: int = 1, finish: int = 0, *, choice: int = 0, used: int | None = None) -> Delivery:
    """A worker's delivery of tokens start, start + 1, ...; with the route when it is the job's first, and with usage
    when it ends its choice (`used`: tokens of all choices)."""
    ids = range(start, start + count)
    delivery = Delivery(chunk=Chunk(choice=choice, start=start, token_ids=ids, finish=finish))
    if start == choice == 0:
        delivery.route.worker = "w0"
    if finish:
        delivery.usage.completion_tokens = start + count if used is None else used
    return delivery


def outside(finish: int = CANCELLED) -> Delivery:
    return Delivery(chunk=Chunk(finish=finish, error="why"), failure=FAILURE_UNAVAILABLE)


def starts(deliveries: list[Delivery]) -> list[int]:
    return [delivery.chunk.start for delivery in deliveries]


def places(deliveries: list[Delivery]) -> list[tuple[int, int, int]]:
    """Choice, start and finish of each."""
    return [(each.chunk.choice, each.chunk.start, each.chunk.finish) for each in deliveries]


def written(choices: list[list[int]], order: list[int]) -> list[Delivery]:
    """The log of a job whose choices deliver so many tokens at a time, and then end; `order` interleaves them."""
    left = {choice: [*sizes, 0] for choice, sizes in enumerate(choices)}
    next_index, log, used = [0] * len(choices), list[Delivery](), 0
    for number in order:
        choice = sorted(left)[number % len(left)]
        size = left[choice].pop(0)
        finish = 0 if left[choice] else STOP
        used += size
        log.append(chunk(next_index[choice], size, finish, choice=choice, used=used))
        next_index[choice] += size
        if finish:
            del left[choice]
    log[0].route.worker = "w0"
    for each in log[1:]:
        each.ClearField("route")
    return log
