"""Taking a job that its worker has not read yet.

::

    peek    the victim's first unread jobs        --> the thief hashes their prompts: how much it holds of each
    steal   (entry, tokens held) of those it knows --> one moves, if it is done sooner at the thief

What was seen may be gone by then: ``steal.lua`` judges in the moment of the move, and takes from the look nothing but
how much the thief holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.message import DecodeError

from kvstore.keys import GROUP
from octavo.v1 import job_pb2

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kvstore.client import Broker

MAX_LOOK: Final = 16
"""Entries that one script call looks at, each some microseconds of the server's time."""
MAX_PEEK_BYTES: Final = 320 * 1024
"""Of one payload: nobody looks at longer ones, which are taken for unknown to the thief. Some 80,000 tokens."""
MAX_PEEK_TOTAL: Final = 2**20
"""Of all payloads in one answer."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A job that its worker has not read yet."""

    entry_id: str
    """In the worker's stream: tells it from a job submitted anew under its request id."""
    job: job_pb2.Job


async def peek(broker: Broker, victim: str, *, count: int = MAX_LOOK, known: Collection[str] = ()) -> list[Waiting]:
    """Those among the first ``count`` unread jobs of worker ``victim`` that are worth a look, in order.

    ``known``: entry ids that are not told again. Jobs of more than MAX_PEEK_BYTES are left out, as is what would make
    the answer longer than MAX_PEEK_TOTAL. Raises BrokerError, ValueError for a ``count`` below 1.
    """
    if count < 1:
        raise ValueError(f"count {count} is below 1")
    keys = broker.keys
    args: list[Any] = [keys.prefix, victim, GROUP, count, MAX_PEEK_BYTES, MAX_PEEK_TOTAL, *known]
    found: list[Waiting] = []
    for entry_id, payload in await broker.script("peek", [keys.jobs(victim)], args):
        try:
            found.append(Waiting(entry_id.decode(), job_pb2.Job.FromString(payload)))
        except DecodeError:
            continue  # no gateway wrote it; whoever claims it says so
    return found


async def steal(
    broker: Broker,
    worker: str,
    incarnation: str,
    victim: str,
    *,
    prefill_s_per_token: float,
    place_s: float,
    margin_s: float,
    held: Sequence[tuple[str, int]],
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
    for entry_id, tokens in held:
        args += [entry_id, tokens]
    moved = int(await broker.script("steal", names, args))
    return None if moved < 0 else moved
