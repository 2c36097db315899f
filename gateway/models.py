"""Which models live workers serve, and with what limits. Learnt from the workers: a gateway has no model files."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gateway.errors import AdmissionError, ModelNotFound, NoWorker, shown
from gateway.router import READY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.tasks import Tasks
    from gateway.tokenize import ModelTokenizer, TokenizerPool
    from kvstore.registry import ModelCard, Registry, WorkerInfo

MAX_KEPT: Final = 16
"""Models whose tokenizer is kept, and names that are remembered after their last worker has gone."""


@dataclass(frozen=True, slots=True)
class Served:
    """A model that can be served now. `workers`: live, ready, and all of the card's fingerprint; never empty."""

    card: ModelCard
    tokenizer: ModelTokenizer
    workers: tuple[WorkerInfo, ...]

    @property
    def context_length(self) -> int:
        """Tokens that a prompt and its answer may have together on any of the workers."""
        return min(worker.context_length for worker in self.workers)


class Models:
    """Finds models by name among the live workers, and keeps their tokenizers."""

    def __init__(self, registry: Registry, pool: TokenizerPool, tasks: Tasks) -> None:
        self._registry = registry
        self._pool = pool
        self._tasks = tasks
        self._loads: dict[str, asyncio.Task[tuple[ModelCard, ModelTokenizer]]] = {}
        self._known: dict[str, None] = {}

    async def find(self, name: str) -> Served:
        """The model of that name, or the only one when `name` is empty.

        Raises AdmissionError (no name, several models), ModelNotFound, NoWorker, BrokerError.
        """
        live = await self._registry.workers()
        self._remember(live)
        workers = choose(live, name, self._known)
        card, tokenizer = await self._load(workers[0].fingerprint)
        return Served(card, tokenizer, workers)

    async def refresh(self) -> None:
        """Loads the tokenizers of models that have appeared, so that no caller waits for it."""
        live = await self._registry.workers()
        self._remember(live)
        for fingerprint in sorted({worker.fingerprint for worker in live})[:MAX_KEPT]:
            with suppress(NoWorker):  # its workers are about to publish it
                await self._load(fingerprint)

    async def workers(self, fingerprint: str) -> tuple[WorkerInfo, ...]:
        """Live and ready workers of one fingerprint."""
        live = await self._registry.workers()
        return tuple(each for each in live if each.fingerprint == fingerprint and each.state == READY)

    def _remember(self, live: Sequence[WorkerInfo]) -> None:
        for worker in live:
            self._known.pop(worker.model, None)
            self._known[worker.model] = None
        while len(self._known) > MAX_KEPT:
            del self._known[next(iter(self._known))]

    async def _load(self, fingerprint: str) -> tuple[ModelCard, ModelTokenizer]:
        """Once for all who ask at the same time. Its own task, so that a caller who leaves does not stop the others."""
        load = self._loads.pop(fingerprint, None)
        if load is None or (load.done() and (load.cancelled() or load.exception() is not None)):
            load = self._tasks.spawn(self._fetch(fingerprint), name=f"tokenizer {fingerprint}")
        self._loads[fingerprint] = load  # at the end: the most recently used
        while len(self._loads) > MAX_KEPT:
            del self._loads[next(iter(self._loads))]
        return await asyncio.shield(load)

    async def _fetch(self, fingerprint: str) -> tuple[ModelCard, ModelTokenizer]:
        card = await self._registry.model(fingerprint)
        if card is None:
            raise NoWorker(f"the workers of fingerprint {fingerprint} have not published their model's tokenizer yet")
        return card, await self._pool.load(card)


def choose(live: Sequence[WorkerInfo], name: str, known: dict[str, None]) -> tuple[WorkerInfo, ...]:
    """The ready workers to serve `name` with: one fingerprint, the one most of them have.

    Several fingerprints of one name happen while a fleet is being updated; they need not agree on token ids, so a
    request stays with one. `known`: names that have been served before.
    """
    if not live:
        raise NoWorker(f"no live worker{f' serves model {shown(name)}' if name else ''}")
    names = sorted({worker.model for worker in live})
    if not name and len(names) > 1:
        raise AdmissionError("model", "empty", f"must be one of {', '.join(map(repr, names))}")
    wanted = name or names[0]
    if wanted not in names:
        if wanted in known:
            raise NoWorker(f"no live worker serves model {shown(wanted)}")
        raise ModelNotFound(wanted, names)
    by_fingerprint: dict[str, list[WorkerInfo]] = defaultdict(list)
    for worker in live:
        if worker.model == wanted and worker.state == READY:
            by_fingerprint[worker.fingerprint].append(worker)
    if not by_fingerprint:
        raise NoWorker(f"all live workers of model {shown(wanted)} are draining")
    most = min(by_fingerprint, key=lambda each: (-len(by_fingerprint[each]), each))
    return tuple(by_fingerprint[most])
