"""Who takes part in the next step, with how many tokens.

There are no prefill and decode modes. Every sequence has ``num_computed`` catching up with its tokens; a step shares
one budget of tokens among them:

1. *streams*, the running sequences that lack one token, get it, so that none waits for another one's prompt;
2. the others, running or waiting, get as large a chunk as is left, best standing first. Beside streams they get at most
   ``chunk_tokens`` in all, which bounds how long a step, and so a stream, takes.

**Standing** is the step of arrival (a tenant's sequence counts as arrived when ``worker.scheduling.shares`` says), less
16 for each unit of priority; then the order of arrival. It never changes. So priority ages: a sequence is overtaken
only by those that count as arrived within 16 steps for each unit of their higher priority, and nobody starves.

**When the pool is full**, the running sequence with the worst standing gives up its blocks and waits again in its old
place; it recomputes prompt and output later. The best never does, so there is always progress. And recomputes are
bounded. When a sequence is preempted for lack of blocks, all that run have a better standing, and what it leaves
behind is less than it needs. It comes back only when that has changed: because one of those has ended, or has computed
a prefix that it shares, which each does once. Whoever is let in meanwhile had to leave room for it. So it is preempted
no more often than twice the number of sequences with a better standing that live while it does, and that number is
finite, for standing can't be improved. In addition a higher priority takes its place at most twice
(``worker.scheduling.admission``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from worker.params import AdmissionError
from worker.scheduling.admission import Admission, Admissions
from worker.scheduling.block import IntegrityError
from worker.scheduling.line import Announcements, Line
from worker.scheduling.plan import LOGIT_ROWS, Plan, Schedule, Scheduled
from worker.scheduling.shares import Shares
from worker.scheduling.tables import Tables
from worker.sequence import Sequence, Status

if TYPE_CHECKING:
    from collections.abc import Iterable

    from worker.scheduling.block_pool import BlockPool

AGE_STEPS = 16
"""So many steps of waiting are worth one unit of priority."""

GOOD_STEPS = 64
"""After so many steps without running out of memory the token budget grows again."""

MOST_TURNS = 16
"""When memory is short, a running sequence gets a token at least every so many steps."""


class Scheduler:
    """Keeps the lines of sequences, and owns the block tables of all in them."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_running: int,
        token_budget: int,
        context_length: int,
        chunk_tokens: int | None = None,
        logit_rows: int = LOGIT_ROWS,
    ) -> None:
        """Schedule over ``pool``, at most ``token_budget`` tokens a step, for prompts beside streams ``chunk_tokens``.

        None: as many as there are. ``logit_rows``: prompt positions a step whose logits are used for scores, at most.
        ``context_length`` is the model's; the effective one, which the attribute holds, is what the pool has room for
        if that is less. No more sequences run at once than a step has tokens, so that each gets one in every step.
        """
        chunk_tokens = token_budget if chunk_tokens is None else chunk_tokens
        _at_least(1, max_running=max_running, token_budget=token_budget, chunk_tokens=chunk_tokens)
        _at_least(1, logit_rows=logit_rows)
        _at_least(2, context_length=context_length)
        self.pool = pool
        self.max_running = min(max_running, token_budget)
        self.token_budget = token_budget
        """Of the next step: less than what was asked for after memory ran out."""
        self.chunk_tokens = chunk_tokens
        self.logit_rows = logit_rows
        self.context_length = min(context_length, pool.total * pool.block_size)
        self.running = Line()
        self.waiting = Line()
        self.preemptions = 0
        self.displacements = 0
        """Those of the preemptions that made place for a higher priority."""
        self.prefix_queried = 0
        self.prefix_hit = 0
        self._admitted: list[str] = []
        announcements = Announcements()
        self._shares = Shares(token_budget, self.max_running)
        self._tables = Tables(pool, announcements)
        self._admissions = Admissions(pool, self.running, self.waiting, announcements, self.max_running)
        self._most_tokens = token_budget
        self._good_steps = 0
        self._steps = 0
        self._arrivals = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. Raises AdmissionError when it could never run, naming the effective limit."""
        limit = self.context_length - 1
        if sequence.num_prompt > limit:
            raise AdmissionError(
                f"the prompt has {sequence.num_prompt} tokens; at most {limit} fit, with 1 to generate, "
                f"for the context is {self.context_length}",
                limit,
            )
        virtual_arrival = self._shares.arrive(sequence, self._steps) - AGE_STEPS * sequence.request.priority
        sequence.standing = (virtual_arrival, self._arrivals, sequence.choice)
        self._arrivals += 1
        self._line_up(sequence)

    def schedule(self) -> Schedule:
        """Decide the next step and allocate its blocks. Not empty while there is any sequence."""
        self._steps += 1
        self._regrow()
        streams: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in self.running:
            (streams if sequence.num_uncomputed == 1 else prompts).append(sequence)
        plan = Plan(self.token_budget, self.chunk_tokens if streams else self.token_budget, self.logit_rows)
        if len(streams) + bool(prompts) > plan.budget:
            # Only when memory is short. Who has waited longest goes first, with one token each.
            streams, prompts = sorted([*streams, *prompts[:1]], key=lambda sequence: sequence.served), []
        for sequence in streams:
            if plan.budget == 0:
                break
            # Those before it in this loop may have preempted it.
            if sequence.status is Status.RUNNING and self._secure(sequence, 1, plan):
                plan.give_stream(sequence)
                sequence.served = self._steps
        for sequence in prompts:
            self._admit(plan, before=sequence)
            if sequence.status is Status.RUNNING:
                self._continue_prompt(sequence, plan)
        self._admit(plan, before=None)
        return plan.schedule()

    def complete(self, entry: Scheduled) -> None:
        """Record that a step has computed an entry's tokens, and offer the blocks that this filled to others.

        It may be fewer tokens than were scheduled, even none: blocks that this makes superfluous go back.
        """
        self._tables.computed(*entry)

    def remove(self, sequence: Sequence) -> None:
        """End a sequence, wherever it is. Between steps only, like every other change."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._tables.give_back(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        if sequence.status is not Status.FINISHED:
            self._shares.leave(sequence)
        sequence.status = Status.FINISHED

    def fork(self, parent: Sequence, choices: Iterable[int]) -> list[Sequence]:
        """Start other choices of a request on the blocks of its prompt, which has just been computed.

        They have the parent's standing, after it. For each the caller appends its first token, or removes it, before
        the next step. Those for which there is no slot wait and hold nothing. A block that is partly filled is copied
        when one of several users writes to it.
        """
        if parent.status is not Status.RUNNING or parent.num_computed != parent.num_prompt or parent.copy:
            raise ValueError(f"{parent} can't be forked: that is done when just its prompt is computed")
        children = [parent.fork(choice) for choice in choices]
        for child in children:
            child.standing = (*parent.standing[:2], child.choice)
            if len(self.running) < self.max_running:
                self.pool.share(child.block_table)
                child.status = Status.RUNNING
                self.running.add(child)
            else:
                self._line_up(child)
        return children

    def shrink(self) -> None:
        """A step ran out of memory: the next ones get half the tokens, until it has gone well for a while."""
        least = -(-len(self.running) // MOST_TURNS)
        self.token_budget = min(self.token_budget, max(self.token_budget // 2, least, 1))
        self._good_steps = 0

    def take_admitted(self) -> tuple[str, ...]:
        """Requests with a sequence that was admitted for the first time since the last call."""
        admitted, self._admitted = tuple(self._admitted), []
        return admitted

    def check_integrity(self) -> None:
        """Between steps: raise IntegrityError unless lines, tables and pool agree."""
        self._tables.check_integrity(self.running)
        for sequence in self.running:
            if sequence.status is not Status.RUNNING or sequence.num_uncomputed < 1:
                raise IntegrityError(f"{sequence} can't run")
        for sequence in self.waiting:
            holds = (sequence.held(), sequence.num_computed, sequence.num_sealed, sequence.announced)
            if sequence.status is not Status.WAITING or holds != ([], 0, 0, 0):
                raise IntegrityError(f"{sequence} holds something while it waits")
        for line in (self.running, self.waiting):
            if [*line] != sorted(line, key=lambda sequence: sequence.standing):
                raise IntegrityError(f"{line} is out of order")
        if len(self.running) > self.max_running:
            raise IntegrityError(f"{len(self.running)} sequences run; at most {self.max_running} may")

    def _line_up(self, sequence: Sequence) -> None:
        sequence.reset()
        sequence.status = Status.WAITING
        self.waiting.add(sequence)

    def _regrow(self) -> None:
        if self.token_budget < self._most_tokens:
            self._good_steps += 1
            if self._good_steps > GOOD_STEPS:
                self.token_budget = min(2 * self.token_budget, self._most_tokens)
                self._good_steps = 0

    def _continue_prompt(self, sequence: Sequence, plan: Plan) -> None:
        num_tokens = plan.portion(sequence, sequence.num_computed)
        if not num_tokens:
            plan.owe(sequence)
        elif self._secure(sequence, num_tokens, plan):
            plan.give_prompt(sequence, num_tokens)
            sequence.served = self._steps

    def _secure(self, sequence: Sequence, num_tokens: int, plan: Plan) -> bool:
        """Get a running sequence the blocks for its next tokens, from those with a worse standing if need be.

        False when it was itself the last that could be preempted.
        """
        while not self._tables.extend(sequence, num_tokens):
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        return True

    def _admit(self, plan: Plan, before: Sequence | None) -> None:
        """Let waiting sequences in while there is room, those only that have a better standing than ``before``."""
        while (admission := self._admissions.next(plan, before)) is not None:
            self._enter(admission, plan)

    def _enter(self, admission: Admission, plan: Plan) -> None:
        sequence, hits, victims = admission
        self.pool.share(hits)  # first, so that no hit goes when its user goes
        for victim in victims:
            victim.displacements += 1
            self.displacements += 1
            self._preempt(victim, plan)
        self.waiting.remove(sequence)
        self._tables.start(sequence, hits)
        sequence.status = Status.RUNNING
        self.running.add(sequence)
        self._count_hits(sequence)
        num_tokens = plan.portion(sequence, sequence.num_computed)
        if not num_tokens or not self._tables.extend(sequence, num_tokens):
            raise IntegrityError(f"{sequence} was admitted without room")
        plan.give_prompt(sequence, num_tokens)
        sequence.served = self._steps

    def _count_hits(self, sequence: Sequence) -> None:
        # Only at the first admission: what a recompute finds is the sequence's own work, no saving to speak of.
        if sequence.cached_tokens is None:
            self._shares.begin(sequence)
            sequence.cached_tokens = sequence.num_computed
            self._admitted.append(sequence.request.request_id)
            if not sequence.unscored:
                self.prefix_queried += sequence.num_prompt
                self.prefix_hit += sequence.num_computed

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        self.running.remove(sequence)
        self._tables.give_back(sequence)
        plan.take_back(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        self._line_up(sequence)


def _at_least(least: int, **limits: int) -> None:
    for name, limit in limits.items():
        if limit < least:
            raise ValueError(f"{name} is {limit}; it must be at least {least}")
