"""Which models live workers serve, and with what limits. Learnt from the workers: a gateway has no model files."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gateway.errors import STARTING, AdmissionError, GatewayError, ModelNotFound, NoWorker, shown
from kvstore.registry import DRAINING, READY

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gateway.tasks import Tasks
    from gateway.tokenize import ModelTokenizer, TokenizerPool
    from kvstore.registry import Registry, WorkerInfo

logger = logging.getLogger(__name__)

MAX_KEPT: Final = 16
"""Tokenizers that are kept, and names that are remembered after their last worker has gone."""

FRESH_S: Final = 1.5
"""A look at the fleet serves all requests for this long: a little more than the time between two of ``refresh``."""

STALE_S: Final = 5.0
"""A look that is longer ago tells nothing of the fleet as it is."""


@dataclass(frozen=True, slots=True)
class Served:
    """A model that can be served now. `workers`: live, ready, and all of one name and one tokenizer; never empty.

    They may have several fingerprints, as those tell devices and kernels apart: what one worker answers another may
    answer with other bits, but both take the same requests.
    """

    name: str
    tokenizer: ModelTokenizer
    workers: tuple[WorkerInfo, ...]

    @property
    def context_length(self) -> int:
        """Tokens that a prompt and its answer may have together on any of the workers."""
        return min(worker.context_length for worker in self.workers)

    @property
    def vocab_size(self) -> int:
        """Token ids below this are known to all of the workers."""
        return min(worker.vocab_size for worker in self.workers)

    @property
    def fingerprint(self) -> str:
        """The one that most of the workers have."""
        return most_common(worker.fingerprint for worker in self.workers)


class Models:
    """Finds models by name among the live workers, and keeps their tokenizers."""

    def __init__(self, registry: Registry, pool: TokenizerPool, tasks: Tasks) -> None:
        self._registry = registry
        self._pool = pool
        self._tasks = tasks
        self._loads: dict[str, asyncio.Task[ModelTokenizer]] = {}
        self._known: dict[str, None] = {}
        self._divided: frozenset[str] = frozenset()
        self._seen: Sequence[WorkerInfo] = ()
        self._seen_at = -math.inf

    async def find(self, name: str, *, now: bool = False) -> Served:
        """The model of that name, or the only one when `name` is empty.

        `now`: asks the broker in any case. Otherwise a worker may have been gone for FRESH_S, which its submission will
        notice, or be there for as long and not be known. Raises AdmissionError (no name, several models),
        ModelNotFound, NoWorker, BrokerError.
        """
        workers: tuple[WorkerInfo, ...] = ()
        if not now and time.monotonic() - self._seen_at < FRESH_S:
            with suppress(GatewayError):  # only a new look may say no
                workers = choose(self._seen, name, self._known)
        workers = workers or choose(await self._read(), name, self._known)
        return Served(workers[0].model, await self._load(workers), workers)

    async def names(self) -> list[str]:
        """Of the models that ready workers serve, in order. Raises BrokerError."""
        return sorted({worker.model for worker in await self._read() if worker.state == READY})

    async def refresh(self) -> bool:
        """Loads the tokenizers of models that have appeared, so that no caller waits for it. Whether anything is
        served: a worker is ready, and its tokenizer loaded."""
        live = await self._read()
        served = False
        self._warn_of_divided(live)
        for digest in sorted({worker.tokenizer for worker in live})[:MAX_KEPT]:
            with suppress(NoWorker):  # its workers are about to publish it
                same = [worker for worker in live if worker.tokenizer == digest]
                await self._load(same)
                served = served or any(worker.state == READY for worker in same)
        return served

    @property
    def states(self) -> dict[str, int]:
        """Live workers by state, at the last look; nothing where that is long ago."""
        if time.monotonic() - self._seen_at > STALE_S:
            return {}
        return {state: sum(each.state == state for each in self._seen) for state in (READY, DRAINING)}

    @property
    def lives(self) -> frozenset[str]:
        """Incarnations of the workers that were alive at the last look."""
        return frozenset(each.incarnation for each in self._seen)

    def fingerprint_of(self, worker: str) -> str:
        """That of a worker, by its id, which was alive at the last look; else empty."""
        return next((each.fingerprint for each in self._seen if each.id == worker), "")

    async def workers(self, served: Served) -> tuple[WorkerInfo, ...]:
        """Who could take the place of the workers of `served`, as of now."""
        same = served.name, served.workers[0].tokenizer
        return tuple(
            each for each in await self._read() if (each.model, each.tokenizer) == same and each.state == READY
        )

    async def _read(self) -> Sequence[WorkerInfo]:
        """The live workers. Remembers them, and their names."""
        began = time.monotonic()
        live = await self._registry.workers()
        if began > self._seen_at:
            self._seen, self._seen_at = live, began
        for worker in live:
            self._known.pop(worker.model, None)
            self._known[worker.model] = None
        while len(self._known) > MAX_KEPT:
            del self._known[next(iter(self._known))]
        return live

    def _warn_of_divided(self, live: Sequence[WorkerInfo]) -> None:
        """Once for each name whose workers begin to disagree."""
        tokenizers: dict[str, set[str]] = defaultdict(set)
        for worker in live:
            tokenizers[worker.model].add(worker.tokenizer)
        divided = frozenset(name for name, digests in tokenizers.items() if len(digests) > 1)
        for name in sorted(divided - self._divided):
            logger.warning("the workers of model %r have several tokenizers: only those of one get jobs", name)
        self._divided = divided

    async def _load(self, workers: Sequence[WorkerInfo]) -> ModelTokenizer:
        """The tokenizer that these workers share.

        Once for all who ask at the same time. Its own task, so that a caller who leaves does not stop the others.
        """
        digest = workers[0].tokenizer
        load = self._loads.pop(digest, None)
        if load is None or (load.done() and (load.cancelled() or load.exception() is not None)):
            load = self._tasks.spawn(self._fetch(workers), name=f"tokenizer {digest}", awaited=True)
        self._loads[digest] = load  # at the end: the most recently used
        while len(self._loads) > MAX_KEPT:
            del self._loads[next(iter(self._loads))]
        return await asyncio.shield(load)

    async def _fetch(self, workers: Sequence[WorkerInfo]) -> ModelTokenizer:
        """From the first card that is there: they have one for each fingerprint."""
        for fingerprint in sorted({worker.fingerprint for worker in workers}):
            card = await self._registry.model(fingerprint)
            if card is not None and card.tokenizer == workers[0].tokenizer:
                return await self._pool.load(card)
        raise NoWorker(f"the workers of model {shown(workers[0].model)} have not published its tokenizer yet")


def choose(live: Sequence[WorkerInfo], name: str, known: dict[str, None]) -> tuple[WorkerInfo, ...]:
    """The ready workers to serve `name` with: those of one tokenizer, the one most of them have.

    Whether their fingerprints agree does not matter: these also tell devices apart, and CPUs and GPUs may share a
    model's requests. Several tokenizers of one name happen while a fleet is being updated, or by a mistake; then a
    request's token ids would not mean the same to all. `known`: names that have been served before.
    """
    if not live:
        raise NoWorker(f"no live worker{f' serves model {shown(name)}' if name else ''}; {STARTING}")
    names = sorted({worker.model for worker in live})
    if not name and len(names) > 1:
        raise AdmissionError("model", "empty", f"must be one of {', '.join(map(repr, names))}")
    wanted = name or names[0]
    if wanted not in names:
        if wanted in known:
            raise NoWorker(f"no live worker serves model {shown(wanted)}; {STARTING}")
        raise ModelNotFound(wanted, names)
    ready = [worker for worker in live if worker.model == wanted and worker.state == READY]
    if not ready:
        raise NoWorker(f"all live workers of model {shown(wanted)} are draining; {STARTING}")
    most = most_common(worker.tokenizer for worker in ready)
    return tuple(worker for worker in ready if worker.tokenizer == most)


def most_common(values: Iterable[str]) -> str:
    """Of equally common ones the smallest, so that all gateways agree."""
    counts = Counter(values)
    return min(counts, key=lambda each: (-counts[each], each))
