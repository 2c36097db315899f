"""What the fleet holds of one prompt: its hashes, and the look at the prefix index and the loads."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from kvstore.block_hash import TOKEN_BYTES, chain_of, root
from kvstore.errors import BrokerError
from kvstore.loop_time import loop_timeout
from kvstore.outage import Outage
from kvstore.prefix_index import Seen
from kvstore.prompts import encoded
from kvstore.tenants import tenant_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gateway.pages import Stored
    from kvstore.block_hash import BlockHash
    from kvstore.prefix_index import PrefixIndex
    from kvstore.registry import Load, Registry, WorkerInfo
    from octavo.v1 import job_pb2

logger = logging.getLogger(__name__)

MOST_TOKENS: Final = 1 << 17
"""Of a prompt that are looked for: what is longer is a hit as far as that at least."""
HASHED_AT_ONCE: Final = 16_384
"""Tokens, counted for each kind of worker, that are hashed on the spot, in a millisecond or two; more in a thread."""
MATCH_S: Final = 0.25
"""How long the index may take. Without it a job is only placed worse, but it must not wait."""
AT_A_TIME: Final = 16
"""Looks at the index that are under way together. More of them would wait for each other on their way to the broker,
and mistake that for its being slow."""
ALONE_S: Final = 1.0
"""After a failure the index is left alone for so long: the next look would most likely wait in vain as well."""
DEGRADED: Final = "degraded"
"""What the lease of a worker says whose part of the index is being repaired."""

Kind = tuple[str, int]
"""Fingerprint and block size: workers that agree on both name prefixes alike."""

_root = lru_cache(maxsize=1024)(root)


class Index(StrEnum):
    """What a decision could know of prefixes."""

    EXACT = "exact"
    DEGRADED = "degraded"
    """Of some worker, what it holds is being repaired in the index."""
    FALLBACK = "fallback"
    """The index could not be read: by load alone."""


@dataclass(frozen=True, slots=True)
class View:
    """What was found, by worker id."""

    loads: Mapping[str, Load]
    held_blocks: Mapping[str, int]
    stored_blocks: Mapping[str, int]
    """What follows in the page store, where the worker would fetch it. Not every worker is there."""
    index: Index


def kind_of(worker: WorkerInfo) -> Kind:
    return worker.fingerprint, worker.block_size


class PromptHashes:
    """The hashes of one prompt's full blocks, computed once for each kind of worker."""

    def __init__(self, job: job_pb2.Job) -> None:
        self._job = job
        self._by_kind: dict[Kind, list[BlockHash]] = {}

    async def prepare(self, workers: Sequence[WorkerInfo]) -> None:
        """Computes what these workers need."""
        missing = {kind_of(each) for each in workers} - self._by_kind.keys()
        if not missing:
            return
        if min(len(self._job.prompt_token_ids), MOST_TOKENS) * len(missing) > HASHED_AT_ONCE:
            self._by_kind |= await asyncio.to_thread(self._compute, missing)
        else:
            self._by_kind |= self._compute(missing)

    def of(self, worker: WorkerInfo) -> Sequence[BlockHash]:
        """Hashes that this worker knows the prompt's blocks by. Prepared before."""
        return self._by_kind[kind_of(worker)]

    def _compute(self, kinds: set[Kind]) -> dict[Kind, list[BlockHash]]:
        job = self._job
        tokens, tenant = encoded(job)[: TOKEN_BYTES * MOST_TOKENS], tenant_of(job.request_id)
        return {kind: chain_of(_root(*kind, job.cache_salt, tenant=tenant), tokens, kind[1]) for kind in kinds}


class Looks:
    """Reads index and loads for decisions."""

    def __init__(
        self,
        index: PrefixIndex,
        registry: Registry,
        pages: Stored | None = None,
        *,
        limit_s: float = MATCH_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index = index
        self._registry = registry
        self._pages = pages
        self._limit_s = limit_s
        self._clock = clock
        self._turns = asyncio.Semaphore(AT_A_TIME)
        self._again = -math.inf
        self._outage = Outage(logger, "reading the prefix index")

    async def look(
        self,
        workers: Sequence[WorkerInfo],
        hashes: PromptHashes,
        promised: Callable[[], Mapping[str, int]],
        begin: Callable[[], object] = lambda: None,
    ) -> View:
        """What each worker holds of the prompt, or is `promised` to (blocks by worker id, of some), and what it is
        charged with.

        `begin` is called when its turn has come, before anything is read. Raises BrokerError when not even the loads
        can be read.
        """
        async with self._turns:
            # In its turn as well: a crowd's hashing would keep the loop from the answers that are waited for.
            await hashes.prepare(workers)
            begin()
            # What is promised now may be in the index before it is read, or after: it counts either way.
            before = promised()
            seen = await self._seen(workers, hashes)
        index = Index.DEGRADED if any(each.index == DEGRADED for each in workers) else Index.EXACT
        if seen is None:
            index = Index.FALLBACK
            seen = {worker: Seen(0, load) for worker, load in (await self._registry.loads(workers)).items()}
        held = _most({worker: each.blocks for worker, each in seen.items()}, before)
        stored = await self._pages.look(workers, hashes, held) if self._pages is not None else {}
        # And what was promised meanwhile: what it has of that in the store as well counts once.
        now = _most(held, promised())
        stored = {worker: max(0, blocks - (now[worker] - held[worker])) for worker, blocks in stored.items()}
        return View({worker: each.load for worker, each in seen.items()}, now, stored, index)

    async def _seen(self, workers: Sequence[WorkerInfo], hashes: PromptHashes) -> dict[str, Seen] | None:
        """None when the index can't be read, or could not a moment ago."""
        if self._clock() < self._again:
            return None
        try:
            async with loop_timeout(self._limit_s):
                seen = await self._match(workers, hashes)
        except TimeoutError:
            self._outage.failed("no answer in time")
        except BrokerError as error:
            self._outage.failed(error)
        else:
            self._outage.worked()
            return seen
        self._again = self._clock() + ALONE_S
        return None

    async def _match(self, workers: Sequence[WorkerInfo], hashes: PromptHashes) -> dict[str, Seen]:
        """One call for each size that blocks have in the fleet: mostly one."""
        by_size: defaultdict[int, list[WorkerInfo]] = defaultdict(list)
        for each in workers:
            by_size[each.block_size].append(each)
        seen: dict[str, Seen] = {}
        for same in by_size.values():
            seen |= await self._index.match(same, {each.fingerprint: hashes.of(each) for each in same})
        return seen


def _most(found: dict[str, int], promised: Mapping[str, int]) -> dict[str, int]:
    """The more of both. Not every worker is promised something."""
    return found | {worker: max(found[worker], blocks) for worker, blocks in promised.items()}
