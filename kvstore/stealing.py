"""Taking a job that its worker has not read yet."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kvstore.keys import GROUP

if TYPE_CHECKING:
    from kvstore.client import Broker

MAX_LOOK = 16
"""Entries that one script call looks at, each some microseconds of the server's time."""


async def steal(
    broker: Broker,
    worker: str,
    incarnation: str,
    victim: str,
    *,
    prefill_s_per_token: float,
    place_s: float,
    margin_s: float,
    max_look: int,
) -> int | None:
    """See ``Jobs.steal``."""
    if not 0 < prefill_s_per_token < math.inf:
        raise ValueError(f"prefill_s_per_token {prefill_s_per_token} is not above 0")
    if not (0 <= place_s < math.inf and 0 <= margin_s < math.inf and max_look > 0):
        raise ValueError(f"place_s {place_s}, margin_s {margin_s}, max_look {max_look}: one of them is out of range")
    if worker == victim:
        return None
    keys = broker.keys
    names = [
        *(keys.worker(victim), keys.jobs(victim)),
        *(keys.worker(worker), keys.jobs(worker), keys.load(worker, incarnation)),
    ]
    args: list[Any] = [GROUP, keys.prefix, victim, worker, incarnation]
    args += [prefill_s_per_token, place_s, margin_s, max_look]
    moved = int(await broker.script("steal", names, args))
    return None if moved < 0 else moved
