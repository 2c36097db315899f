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


class _Part(NamedTuple):
    """What a sequence has been given of a step."""

    num_tokens: int
    of_prompts: bool
    """Whether the tokens count as a prompt's: they share ``chunk_tokens``."""
    scores: int
    """Prompt positions among them whose logits are wanted."""
    owed: int
    """Blocks that it will still need for the rest of its tokens."""


_STREAM = _Part(1, False, 0, 0)


class Plan:
    """A schedule in the making: what of the step's limits is left."""

    def __init__(self, budget: int, prompt_budget: int, logit_rows: int) -> None:
        """A step of at most ``budget`` tokens, of which prompts get at most ``prompt_budget`` in all.

        At most ``logit_rows`` of the prompts' logits are used for scores.
        """
        self.budget = budget
        self.owed = 0
        """Blocks that are spoken for by sequences with a part, or passed over: admissions leave them alone."""
        self.passed = 0
        """Waiting sequences that wait for a prefix while others behind them may come in."""
        self.closed = False
        """Nobody else comes in during this step."""
        self._prompt_budget = prompt_budget
        self._scores = logit_rows
        self._parts: dict[Sequence, _Part] = {}

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
        self._parts[sequence] = _STREAM
        self.budget -= 1

    def give_prompt(self, sequence: Sequence, num_tokens: int) -> None:
        """A sequence gets some of the tokens that it lacks, for which its table is long enough now."""
        owed = sequence.blocks_for(sequence.num_tokens) - len(sequence.block_table)
        part = _Part(num_tokens, True, sequence.to_score(num_tokens), owed)
        self._parts[sequence] = part
        self.budget -= num_tokens
        self._prompt_budget -= num_tokens
        self._scores -= part.scores
        self.owed += owed

    def take_back(self, sequence: Sequence) -> None:
        """A sequence has lost its place, and its part if it had one: the tokens go to others."""
        part = self._parts.pop(sequence, None)
        if part is None:
            return
        self.budget += part.num_tokens
        self.owed -= part.owed
        self._scores += part.scores
        if part.of_prompts:
            self._prompt_budget += part.num_tokens

    def pass_over(self, sequence: Sequence) -> None:
        """A sequence waits for a prefix. Who passes it leaves room for it."""
        self.passed += 1
        self.owed += sequence.own_blocks

    def schedule(self) -> Schedule:
        """The plan, made fast."""
        return Schedule(
            tuple([Scheduled(sequence, part.num_tokens) for sequence, part in self._parts.items()]),
            tuple([sequence.copy for sequence in self._parts if sequence.copy is not None]),
        )
