"""Pool and scheduler at work, without an engine: pages that remember what was written, and every check there is.

A slot of a page holds the node of a tree of prefixes: which token, after which others. So a page shows whether it holds
just what a reader expects of it, whoever wrote or copied it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING
from unittest.mock import patch

import kvstore.block_hash
from kvstore.block_hash import BlockHash, root
from worker.params import SamplingParams, StopParams
from worker.scheduling.block import EventKind
from worker.scheduling.block_pool import BlockPool
from worker.scheduling.plan import Scheduled
from worker.scheduling.scheduler import Scheduler
from worker.sequence import Request, Sequence, Status

if TYPE_CHECKING:
    from collections.abc import Callable

POISONED = -1
"""The outcome of an entry whose content can't be trusted."""


@dataclass
class Fate:
    """What the world knows about a sequence beside its state."""

    path: list[int] = field(default_factory=list)
    """The node of each of its tokens."""
    hashes: list[BlockHash] = field(default_factory=list)
    better: set[Sequence] = field(default_factory=set)
    """All with a better standing that lived while it did."""
    setbacks: int = 0
    """How often in its life a part of a step was not computed in full: blocks go back then without any end."""


class World:
    """Sequences arrive, run, fork and end; after every step everything is checked."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = 4,
        max_running: int = 4,
        token_budget: int = 16,
        chunk_tokens: int | None = None,
        cache_blocks: int | None = None,
        logit_rows: int = 128,
        hash_bits: int = 256,
        block_run: int = 1,
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size, cache_blocks, block_run)
        self.scheduler = Scheduler(
            self.pool,
            max_running=max_running,
            token_budget=token_budget,
            chunk_tokens=chunk_tokens,
            logit_rows=logit_rows,
            context_length=10_000,
        )
        self.block_size = block_size
        self.live: dict[Sequence, Fate] = {}
        self.steps = 0
        self.copies = 0
        self.offered: set[BlockHash] = set()
        self.told: list[object] = []
        """What was scheduled and what was told of prefixes, in order: all but the blocks' ids."""
        self._most_tokens = token_budget
        self._pages: list[list[int]] = [[-1] * block_size for _ in range(num_blocks)]
        self._nodes: dict[tuple[int | str, int], int] = {}
        self._ends: dict[BlockHash, set[int]] = {}
        """Of each hash of a full block, the nodes at the block's end: more than one where hashes collide."""
        self._hash_bytes = hash_bits // 8
        self._patch = patch("worker.sequence.child", self._child)
        self._patch.start()

    @property
    def collisions(self) -> int:
        """Hashes that name more than one prefix."""
        return sum(len(ends) > 1 for ends in self._ends.values())

    def close(self) -> None:
        self._patch.stop()

    def add(
        self,
        prompt: tuple[int, ...],
        *,
        max_tokens: int = 4,
        priority: int = 0,
        n: int = 1,
        salt: str = "",
        scored: bool = False,
        tenant: str = "",
    ) -> Sequence:
        request = Request(
            f"r{len(self._nodes)}.{len(self.live)}",
            prompt,
            SamplingParams(),
            StopParams(max_tokens),
            salt=salt,
            n=n,
            priority=priority,
            prompt_logprobs=0 if scored else None,
            tenant=tenant,
        )
        sequence = Sequence(request, root=root("world", self.block_size, salt), block_size=self.block_size)
        self.scheduler.add(sequence)
        self._welcome(sequence)
        return sequence

    def end(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        del self.live[sequence]

    def step(self, outcome: Callable[[Scheduled], int] = lambda entry: entry.num_tokens) -> int:
        """One step. ``outcome`` tells how many of an entry's tokens get computed, or POISONED. Returns the tokens."""
        self.steps += 1
        owed = {one for one in self.scheduler.running if one.num_uncomputed == 1}
        best = self.scheduler.running[0] if len(self.scheduler.running) else None
        budget = self.scheduler.token_budget
        schedule = self.scheduler.schedule()
        entries = schedule.entries
        served = {entry.sequence for entry in entries}
        assert len(served) == len(entries)
        assert bool(entries) == bool(self.live)
        assert schedule.num_tokens <= max(budget, self.scheduler.token_budget) <= self._most_tokens
        if owed:
            prompts = sum(entry.num_tokens for entry in entries if entry.sequence not in owed)
            assert prompts <= self.scheduler.chunk_tokens
        assert sum(entry.sequence.to_score(entry.num_tokens) for entry in entries) <= self.scheduler.logit_rows
        if self.scheduler.token_budget == self._most_tokens:
            waiting = {one for one in self.live if one.status is Status.WAITING}
            assert owed <= served | waiting, "a stream was passed over"
            assert best is None or best not in waiting or self.scheduler.running[0].standing < best.standing
            assert not self.live or self.scheduler.running[0] in served, "the best did not run"
        self.told += [(*entry.sequence.standing, entry.num_tokens, entry.sequence.num_computed) for entry in entries]
        self._run(schedule.copies, entries)
        for entry in entries:
            self._apply(entry, outcome(entry))
        self.check()
        return schedule.num_tokens

    def check(self) -> None:
        """Between steps: books, pages, offers, bounds."""
        self.scheduler.check_integrity()
        for event in self.pool.take_events():
            self.told.append(event)
            if event.kind is EventKind.CLEARED:
                self.offered.clear()
            elif event.kind is EventKind.STORED:
                assert event.hash is not None
                assert event.hash not in self.offered
                self.offered.add(event.hash)
            else:
                assert event.hash in self.offered
                self.offered.remove(event.hash)
        assert {hash_ for hash_ in map(self.pool.hash_of, range(self.pool.total)) if hash_ is not None} == self.offered
        assert set(self.scheduler.running) | set(self.scheduler.waiting) == set(self.live)
        for sequence in self.scheduler.running:
            self._check_pages(sequence)
        self._check_offers()
        for sequence, fate in self.live.items():
            assert sequence.displacements <= 2
            assert sequence.preemptions - sequence.displacements <= 2 * len(fate.better) + fate.setbacks

    def finish(self) -> None:
        """Run until all have ended."""
        work = sum(one.num_tokens + one.request.stopping.max_tokens * one.request.n for one in self.live)
        limit = self.steps + 200 + 20 * work
        while self.live:
            self.step()
            assert self.steps < limit, "no end"
        assert self.pool.used_count == 0

    def _child(self, parent: BlockHash, token_ids: tuple[int, ...]) -> BlockHash:
        return BlockHash(kvstore.block_hash.child(parent, token_ids)[: self._hash_bytes])

    def _welcome(self, sequence: Sequence) -> None:
        fate = Fate()
        for other, known in self.live.items():
            if other.standing < sequence.standing:
                fate.better.add(other)
            else:
                known.better.add(sequence)
        self.live[sequence] = fate

    def _path(self, sequence: Sequence) -> list[int]:
        fate = self.live[sequence]
        path = fate.path
        for token in sequence.tokens[len(path) :]:
            parent: int | str = path[-1] if path else f"salt {sequence.request.salt}"
            path.append(self._nodes.setdefault((parent, token), len(self._nodes)))
            if len(path) % self.block_size == 0:
                parent_hash = fate.hashes[-1] if fate.hashes else sequence.root
                tokens = tuple(sequence.tokens[len(path) - self.block_size : len(path)])
                fate.hashes.append(self._child(parent_hash, tokens))
                self._ends.setdefault(fate.hashes[-1], set()).add(path[-1])
        return path

    def _run(self, copies: tuple[tuple[int, int], ...], entries: tuple[Scheduled, ...]) -> None:
        """What a model does to the pages in a step."""
        sources, targets = {source for source, _ in copies}, [target for _, target in copies]
        assert len(set(targets)) == len(targets)
        assert not sources & set(targets)
        self.copies += len(copies)
        for source, target in copies:
            self._pages[target] = [*self._pages[source]]
        users: dict[int, int] = {}
        for sequence in self.scheduler.running:
            for block in sequence.block_table:
                users[block] = users.get(block, 0) + 1
        for sequence, _ in entries:
            # All reads come before all writes: what this very step writes is nobody else's history yet.
            self._check_pages(sequence)
        for sequence, num_tokens in entries:
            path, start = self._path(sequence), sequence.num_computed
            assert len(sequence.block_table) == sequence.blocks_for(start + num_tokens)
            for position in range(start, start + num_tokens):
                block = sequence.block_table[position // self.block_size]
                assert users[block] == 1, f"block {block} is written to while others read it"
                assert self.pool.hash_of(block) is None, f"block {block} is written to while it is offered"
                self._pages[block][position % self.block_size] = path[position]

    def _apply(self, entry: Scheduled, outcome: int) -> None:
        sequence = entry.sequence
        if outcome == POISONED:
            self.pool.forget(sequence.block_table)
            self.end(sequence)
            return
        if outcome < entry.num_tokens:
            for fate in self.live.values():
                fate.setbacks += 1
        done = Scheduled(sequence, outcome)
        sequence.scored += sequence.to_score(outcome)
        self.scheduler.complete(done)
        if sequence.num_uncomputed:
            return
        request = sequence.request
        grown = [sequence]
        if sequence.choice == 0 and sequence.num_output == 0 and request.n > 1:
            children = self.scheduler.fork(sequence, range(1, request.n))
            for child in children:
                self._welcome(child)
            grown += children
        for one in grown:
            # Few tokens, so that choices part late or never, and meet others' prompts.
            one.tokens.append((sum(one.tokens) + one.num_output * one.choice) % 3)
            if one.num_output >= request.stopping.max_tokens or one.num_tokens >= self.scheduler.context_length:
                self.end(one)

    def _check_pages(self, sequence: Sequence) -> None:
        path, size = self._path(sequence), self.block_size
        for index in range(sequence.blocks_for(sequence.num_computed)):
            expected = path[index * size : min((index + 1) * size, sequence.num_computed)]
            found = self._pages[sequence.block_table[index]][: len(expected)]
            assert found == expected, f"{sequence} finds something else in block {index} of its table"

    def _check_offers(self) -> None:
        parents = {node: parent for (parent, _), node in self._nodes.items()}
        for block in range(self.pool.total):
            hash_ = self.pool.hash_of(block)
            if hash_ is not None:
                page = self._pages[block]
                assert page[-1] in self._ends[hash_]
                assert all(parents[node] == before for before, node in pairwise(page))
