"""Who takes part in the next step, with how many tokens.

There are no prefill and decode modes. Every sequence has ``num_computed`` catching up with its tokens; a step shares
one budget of tokens among them:

1. running sequences that lack one token, so that no stream waits for another one's prompt;
2. running sequences that lack more, oldest first, each with as large a chunk as is left;
3. waiting sequences, first come, first served, while there is room.

When the pool is full, the youngest running sequence gives up its blocks and waits again at the front of the queue; it
recomputes prompt and output later. The oldest never does, so there is always progress.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from worker.block_pool import IntegrityError
from worker.params import AdmissionError
from worker.sequence import Sequence, Status

if TYPE_CHECKING:
    from worker.block_pool import BlockPool


class Scheduled(NamedTuple):
    """One sequence's part in a step: its next ``num_tokens`` uncomputed tokens."""

    sequence: Sequence
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """A step's work. Blocks for all of it have been allocated."""

    entries: tuple[Scheduled, ...]

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)


class Scheduler:
    """Keeps the queues, and owns the block tables of all sequences in them."""

    def __init__(self, pool: BlockPool, *, max_running: int, token_budget: int, context_length: int) -> None:
        """Schedule over ``pool``, at most ``token_budget`` tokens a step.

        ``context_length`` is the model's; the effective one, which the attribute holds, is what the pool has room for
        if that is less. No more sequences run at once than a step has tokens, so that each gets one in every step.
        """
        if min(max_running, token_budget) < 1 or context_length < 2:
            raise ValueError(
                f"max_running ({max_running}) and token_budget ({token_budget}) must be at least 1, "
                f"context_length ({context_length}) at least 2"
            )
        self.pool = pool
        self.max_running = min(max_running, token_budget)
        self.token_budget = token_budget
        self.context_length = min(context_length, pool.total * pool.block_size)
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.preemptions = 0
        self.prefix_queried = 0
        self.prefix_hit = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. Raises AdmissionError when it could never run, naming the effective limit."""
        limit = self.context_length - 1
        if sequence.num_prompt > limit:
            raise AdmissionError(
                f"the prompt has {sequence.num_prompt} tokens; at most {limit} fit, with 1 to generate, "
                f"for the context is {self.context_length}",
                limit,
            )
        self.waiting.append(sequence)

    def schedule(self) -> Schedule:
        """Decide the next step and allocate its blocks. Not empty while there is any sequence."""
        step = _Step(self.token_budget)
        lacking_one = [sequence for sequence in self.running if sequence.num_uncomputed == 1]
        lacking_more = [sequence for sequence in self.running if sequence.num_uncomputed > 1]
        for sequence in (*lacking_one, *lacking_more):
            # Those before it in this loop may have preempted it.
            if sequence.status is Status.RUNNING and step.budget > 0:
                self._continue(sequence, step)
        while step.budget > 0 and self._admit_next(step):
            pass
        return Schedule(tuple(Scheduled(*entry) for entry in step.parts.items()))

    def complete(self, entry: Scheduled) -> None:
        """Record that a step has computed an entry's tokens, and offer the blocks that this filled to others."""
        sequence = entry.sequence
        sequence.num_computed += entry.num_tokens
        full = sequence.num_computed // sequence.block_size
        if full == sequence.num_sealed:
            return
        hashes = sequence.hash_blocks(full)
        for index in range(sequence.num_sealed, full):
            block = sequence.block_table[index]
            self.pool.seal(block, sequence.parent_hash(index), hashes[index], sequence.block_tokens(index))
        sequence.num_sealed = full

    def remove(self, sequence: Sequence) -> None:
        """End a sequence, wherever it is. Between steps only, like every other change."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._give_back(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED

    def check_integrity(self) -> None:
        """Between steps: raise IntegrityError unless queues, tables and pool agree."""
        self.pool.check_integrity([sequence.block_table for sequence in self.running])
        for sequence in self.waiting:
            holds = (sequence.block_table, sequence.num_computed, sequence.num_sealed)
            if sequence.status is not Status.WAITING or holds != ([], 0, 0):
                raise IntegrityError(f"{sequence} holds something while it waits")
        for sequence in self.running:
            if sequence.status is not Status.RUNNING or sequence.num_uncomputed < 1:
                raise IntegrityError(f"{sequence} can't run")
            if len(sequence.block_table) != sequence.blocks_for(sequence.num_computed):
                raise IntegrityError(f"{sequence} has a table that doesn't fit")
            for index, block in enumerate(sequence.block_table):
                hash_ = self.pool.hash_of(block)
                if hash_ is not None and hash_ != sequence.hash_blocks(sequence.num_sealed)[index]:
                    raise IntegrityError(f"{sequence} has block {block}, which is offered as something else")

    def _continue(self, sequence: Sequence, step: _Step) -> None:
        """Give a running sequence its next tokens, preempting younger ones, or at last itself, for the blocks."""
        num_tokens = min(sequence.num_uncomputed, step.budget)
        while not self._extend_table(sequence, num_tokens):
            victim = self.running[-1]
            self._preempt(victim, step)
            if victim is sequence:
                return
        step.give(sequence, num_tokens)

    def _extend_table(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate what the next ``num_tokens`` tokens need. False, and no change, when the pool has too little."""
        needed = sequence.blocks_for(sequence.num_computed + num_tokens) - len(sequence.block_table)
        blocks = self.pool.allocate(needed)
        if blocks is None:
            return False
        sequence.block_table += blocks
        return True

    def _preempt(self, sequence: Sequence, step: _Step) -> None:
        self.running.remove(sequence)
        self._give_back(sequence)
        step.take_back(sequence)
        sequence.status = Status.WAITING
        sequence.preemptions += 1
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _give_back(self, sequence: Sequence) -> None:
        self.pool.free(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed = 0
        sequence.num_sealed = 0

    def _admit_next(self, step: _Step) -> bool:
        """Start the sequence at the front of the queue, on the prefix that is cached now. False when it must wait."""
        if not self.waiting or len(self.running) >= self.max_running:
            return False
        sequence = self.waiting[0]
        # The last token is always computed: its logits are what the first step is for.
        hashes = sequence.hash_blocks((sequence.num_tokens - 1) // sequence.block_size)
        hits = self.pool.match(sequence.root, hashes, sequence.tokens)
        if not self._has_room(sequence, hits):
            return False
        self.waiting.popleft()
        self.pool.share(hits)
        sequence.block_table = hits
        sequence.num_sealed = len(hits)
        sequence.num_computed = len(hits) * sequence.block_size
        sequence.status = Status.RUNNING
        self.running.append(sequence)
        self._count_hits(sequence)
        num_tokens = min(sequence.num_uncomputed, step.budget)
        if not self._extend_table(sequence, num_tokens):
            raise IntegrityError(f"{sequence} was admitted without room")
        step.give(sequence, num_tokens)
        return True

    def _has_room(self, sequence: Sequence, hits: list[int]) -> bool:
        """Whether all its tokens fit, not only those of its first step.

        So no prompt is started that must stop half-way, and a preempted sequence comes back only once some other one
        has ended: the number of recomputes is bounded. (Running ones need no blocks set aside. As long as there is
        budget left, all their tokens are in this step already.)
        """
        shared = sum(self.pool.in_use(block) for block in hits)
        return sequence.blocks_for(sequence.num_tokens) - shared <= self.pool.available

    def _count_hits(self, sequence: Sequence) -> None:
        # Only at the first admission: what a recompute finds is the sequence's own work, no saving to speak of.
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.num_computed
            self.prefix_queried += sequence.num_prompt
            self.prefix_hit += sequence.num_computed


class _Step:
    """A schedule in the making."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.parts: dict[Sequence, int] = {}

    def give(self, sequence: Sequence, num_tokens: int) -> None:
        self.parts[sequence] = num_tokens
        self.budget -= num_tokens

    def take_back(self, sequence: Sequence) -> None:
        """Drop a preempted sequence, which may have its part already; the tokens go to others."""
        self.budget += self.parts.pop(sequence, 0)
