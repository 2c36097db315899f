"""The prefix index: which worker holds how much of a prompt.

Each worker keeps a set of the blocks that its pool offers, by the first half of their hashes: written with its commits
(``Jobs.commit``), renewed with its lease, named by its incarnation, so that no life of a worker is taken for another.
The index is advice. One that is wrong costs time; whether a block is a hit is decided by the pool that has it.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.registry import HELD_LEASES, LEASE_TTL_MS
from kvstore.worker_info import Load

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from kvstore.block_hash import BlockHash
    from kvstore.client import Broker
    from kvstore.registry import WorkerInfo

SHORT: Final = 16
"""Bytes of a BlockHash that the index keeps. Two prefixes of a fleet never share them by chance."""
WHOLE: Final = 32
"""Bytes of a BlockHash."""
BATCH: Final = 4096
"""Hashes that one script call takes: some milliseconds of the server's time."""


def short(block: bytes) -> bytes:
    """A BlockHash as the index has it."""
    return block[:SHORT]


@dataclass(frozen=True, slots=True)
class HeldChange:
    """What a pool began and ceased to offer: the net effect, so that no hash is in both. Short hashes.

    ``added`` parents first, ``removed`` parents last: a change of more than BATCH hashes is written in parts.
    """

    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


class Seen(NamedTuple):
    """What the broker knows of one worker, with regard to one prompt."""

    blocks: int
    """Of the prompt, from its beginning on, that the worker holds."""
    load: Load


class PrefixIndex:
    """Reads and repairs the index. All methods raise BrokerError."""

    def __init__(self, broker: Broker, *, lease_ttl_ms: int = LEASE_TTL_MS) -> None:
        self._broker = broker
        self._held_ttl_ms = HELD_LEASES * lease_ttl_ms

    async def match(self, workers: Sequence[WorkerInfo], hashes: Mapping[str, Sequence[BlockHash]]) -> dict[str, Seen]:
        """By worker id. ``hashes``: the prompt's full blocks, in order, by the fingerprint of the workers that they are
        for; a worker whose fingerprint is not there holds 0 blocks. One call, whatever the number of workers.
        """
        if not workers:
            return {}
        keys = self._broker.keys
        numbers = {fingerprint: number for number, fingerprint in enumerate(hashes, start=1)}
        asked: list[str | int] = []
        for worker in workers:
            asked += (f"{worker.id}:{worker.incarnation}", numbers.get(worker.fingerprint, 0))
        chains = [joined(chain) for chain in hashes.values()]
        reply = await self._broker.script("match", [keys.workers], [keys.prefix, json.dumps(asked), *chains])
        blocks, *charged = (reply[field::5] for field in range(5))
        seen = map(Seen, blocks, map(Load, *charged))
        return dict(zip((worker.id for worker in workers), seen, strict=True))

    async def replace(self, worker: str, incarnation: str, held: Collection[bytes]) -> int:
        """Writes the whole set of short hashes anew; how many it has then.

        What is committed while this runs may be lost with the old set: the caller commits no change meanwhile, or
        looks at the number again.
        """
        keys = self._broker.keys
        names = [keys.held_replacement(worker, incarnation, secrets.token_hex(8)), keys.held(worker, incarnation)]
        if not held:
            await self._broker.call("DEL", names[1])
            return 0
        for packed in batches(held):
            await self._broker.script("replace", names, [packed, self._held_ttl_ms])
        return int(await self._broker.script("replace", names, ["", self._held_ttl_ms]))

    async def members(self, worker: str, incarnation: str) -> set[bytes]:
        """The short hashes that the index has. Those added or removed while it reads may be among them or not."""
        name, cursor = self._broker.keys.held(worker, incarnation), 0
        found: set[bytes] = set()
        while True:
            cursor, page = await self._broker.call("SSCAN", name, cursor, "COUNT", 1000)
            found.update(page)
            if not int(cursor):
                return found


def joined(chain: Sequence[BlockHash]) -> bytes:
    """A prompt's hashes as match.lua takes them: it cuts out the few that it looks for. ValueError when one is none."""
    whole = b"".join(chain)
    if len(whole) != WHOLE * len(chain):
        raise ValueError(f"a hash of a block has {WHOLE} bytes")
    return whole


def pack(hashes: Collection[bytes]) -> bytes:
    """Short hashes as scripts take them. ValueError when one is not short."""
    packed = b"".join(hashes)
    if len(packed) != SHORT * len(hashes):
        raise ValueError(f"a hash in the prefix index has {SHORT} bytes")
    return packed


def batches(hashes: Collection[bytes]) -> list[bytes]:
    """Packed, at most BATCH in each, in order; none for no hashes."""
    packed = pack(hashes)
    return [packed[at : at + SHORT * BATCH] for at in range(0, len(packed), SHORT * BATCH)]
