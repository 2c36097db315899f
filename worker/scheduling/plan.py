"""A step's work: who takes part with how many tokens, and the plan from which it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from worker.sequence import Sequence

LOGIT_ROWS = 128
"""Prompt positions whose logits a step gives for scores, at most: each row is as wide as the vocabulary."""


class Scheduled(NamedTuple):
    """One sequence's part in a step: its next ``num_tokens`` uncomputed tokens."""

    sequence: Sequence
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """A step's work. Blocks for all of it have been allocated."""

    entries: tuple[Scheduled, ...]
    copies: tuple[tuple[int, int], ...] = ()
    """Blocks to be copied before any entry is computed, (from, to). None is both copied from and to."""

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)


class Plan:
    """A schedule in the making: what of the step's limits is left."""

    def __init__(self, budget: int, prompt_budget: int, logit_rows: int) -> None:
        """A step of at most ``budget`` tokens, of which prompts get at most ``prompt_budget`` in all.

        At most ``logit_rows`` of the prompts' logits are used for scores.
        """
        self.budget = budget
        self.owed = 0
        """Blocks that running prompts and those passed over will need: admissions leave them alone."""
        self.passed = 0
        """Waiting sequences that have been passed over: others behind them may come in."""
        self.closed = False
        """Nobody else comes in during this step."""
        self._prompt_budget = prompt_budget
        self._scores = logit_rows
        self._parts: dict[Sequence, int] = {}

    @property
    def prompt_room(self) -> int:
        """Tokens that are left for prompts."""
        return min(self.budget, self._prompt_budget)

    def portion(self, sequence: Sequence, start: int) -> int:
        """How many of its tokens from position ``start`` on a prompt can be given."""
        portion = min(sequence.num_tokens - start, self.prompt_room)
        if sequence.unscored:
            first = max(sequence.scored, start)  # what is only recomputed before it needs no logits
            if sequence.num_prompt - 1 - first > self._scores:
                portion = min(portion, first - start + self._scores)
        return portion

    def give_stream(self, sequence: Sequence) -> None:
        """A sequence gets the one token that it lacks, or one of several."""
        self._parts[sequence] = 1
        self.budget -= 1

    def give_prompt(self, sequence: Sequence, num_tokens: int) -> None:
        """A sequence gets some of the tokens that it lacks, for which its table is long enough now."""
        self._parts[sequence] = num_tokens
        self.budget -= num_tokens
        self._prompt_budget -= num_tokens
        self._scores -= sequence.to_score(num_tokens)
        self.owe(sequence)

    def owe(self, sequence: Sequence) -> None:
        """A running sequence will need blocks for the rest of its tokens."""
        self.owed += sequence.blocks_for(sequence.num_tokens) - len(sequence.block_table)

    def take_back(self, sequence: Sequence) -> None:
        """A sequence has lost its place. Its part, if it had one, goes to others.

        Only streams can have theirs: prompts get parts best standing first, and lose their places worst standing first.
        """
        self.budget += self._parts.pop(sequence, 0)

    def pass_over(self, sequence: Sequence) -> None:
        """A sequence waits for something else than room. Who passes it leaves a slot and blocks for it."""
        self.passed += 1
        self.owed += sequence.own_blocks

    def schedule(self) -> Schedule:
        """The plan, made fast."""
        return Schedule(
            tuple([Scheduled(*part) for part in self._parts.items()]),
            tuple([sequence.copy for sequence in self._parts if sequence.copy is not None]),
        )
