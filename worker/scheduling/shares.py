"""Tenants' shares of a worker: when a sequence counts as arrived, for its standing.

There is a virtual clock, in steps: it stands where that sequence counts as arrived that came in last. A tenant's
sequences count as arrived one after the other, each when the work of those before it would be done if this tenant alone
kept the worker busy; and never before the clock. So of several tenants that always have something waiting each gets as
much done as the others, by tokens, however much each has waiting; who comes anew begins where the others are by now;
what one did while it was alone is not held against it; and one alone has its sequences in order, as if there were no
shares. (Its priorities count steps of that order.)

That is start-time fair queueing (Goyal et al., 1996) by the tokens of virtual token counters (Sheng et al., "Fairness
in Serving Large Language Models", 2024). How long an answer becomes is not known when it is asked for: it is taken to
be as long as its tenant's last ones, and what it was more or less is settled at its end. So standings need not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from worker.sequence import Sequence

KNOWN: Final = 1024
"""Tenants above which those are forgotten that have nothing here."""
FIRST_ANSWER: Final = 256.0
"""Tokens that an answer is taken to have where none of its tenant is known, if it may have so many."""
NEWEST: Final = 0.125
"""Weight of a tenant's last answer in what the next is taken to be."""


class Charge(NamedTuple):
    """What a sequence was charged when it came."""

    begin: float
    """When it counts as arrived."""
    cost: float
    said: int
    """Output tokens that it came with."""


@dataclass(slots=True)
class _Account:
    end: float = 0.0
    """When all of a tenant's work that has come would be done."""
    newest: Sequence | None = None
    """Its last one, until that ends."""
    answer: float = FIRST_ANSWER
    """Tokens that its next answer is taken to have."""


class Shares:
    """The accounts of tenants, in steps of the scheduler."""

    def __init__(self, token_budget: int, max_running: int) -> None:
        # A step computes so many tokens of prompts, and one more for so many answers: half a step for either.
        self._per_prompt_token = 0.5 / token_budget
        self._per_new_token = 0.5 / max_running
        self._clock = 0.0
        self._accounts: dict[str, _Account] = {}
        self._charges: dict[Sequence, Charge] = {}
        """Of those that have come and not ended."""

    def arrive(self, sequence: Sequence, now: int) -> float:
        """The step at which a new sequence counts as arrived. What is nobody's arrives when it does."""
        tenant = sequence.request.tenant
        if not tenant:
            return self._clock if self._charges else now
        if not self._charges:
            self._clock = max(self._clock, now)
            self._accounts.clear()
        if len(self._accounts) > KNOWN:
            live = {each.request.tenant for each in self._charges}
            self._accounts = {each: account for each, account in self._accounts.items() if each in live}
        account = self._accounts.setdefault(tenant, _Account())
        start = max(self._clock, account.end)
        # A leader is charged for the choices that will be forked from it.
        choices = sequence.request.n if sequence.num_output == 0 and sequence.choice == 0 else 1
        rest = min(account.answer, sequence.request.stopping.max_tokens) - sequence.num_output
        cost = self._cost(sequence.num_tokens, choices * max(rest, 1.0))
        account.end = start + cost
        # What is given back moves who comes next forward, but not before the tenant's own that came before.
        begin = max(start, self._charges[account.newest].begin) if account.newest is not None else start
        self._charges[sequence] = Charge(begin, cost, sequence.num_output)
        account.newest = sequence
        return begin

    def begin(self, sequence: Sequence) -> None:
        """A sequence comes in, for the first time. One of higher priority does so before its turn, and moves the clock
        no further than those behind it are."""
        if sequence in self._charges:
            self._clock = max(self._clock, sequence.standing[0])

    def leave(self, sequence: Sequence) -> None:
        """A sequence has ended: settles what it was charged and what it took."""
        charge = self._charges.pop(sequence, None)
        account = self._accounts.get(sequence.request.tenant)
        if account is None:
            return
        if account.newest is sequence:
            account.newest = None
        took = self._cost(0, sequence.num_output - (charge.said if charge else 0))
        if charge is not None and sequence.cached_tokens is not None:
            took += self._cost(sequence.num_prompt + charge.said - sequence.cached_tokens, 0)
        account.end += took - (charge.cost if charge else 0.0)
        if sequence.num_output:
            account.answer += NEWEST * (sequence.num_output - account.answer)

    def _cost(self, prompt_tokens: int, new_tokens: float) -> float:
        return prompt_tokens * self._per_prompt_token + new_tokens * self._per_new_token
