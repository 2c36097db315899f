"""What it costs to give a job to a worker, in seconds. Pure: no clock, no I/O, no randomness.

::

    cost = wait      for prompts that are charged to the worker, for the steps of what runs there, and for a slot or
                     blocks if all are taken
         + prefill   of the prompt's tokens that the worker does not have, at its own rate
         + fetch     of those that it takes from the page store, where that is faster than to compute them
         + decode    of the answer there, and by how much this job slows down the answers of all that run there

So a prefix in a worker's cache is worth the seconds that computing it takes, and no more: once the queue before it is
longer than that, the job goes elsewhere, and the prefix is in two places. Where nothing is cached, what is left is the
work that workers have, and what jobs add to each other's.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.registry import READY

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from kvstore.registry import Load

NEAR: Final = 1.5
"""Rates of workers of one kind within this factor of their median are taken for equal, and of those beyond it only what
is beyond counts: at no value does a little more make a worker another one. They are measured beside whatever else the
machines do. Workers that only seem to differ would get unequal shares of what saturates all of them; of those that all
hold a hot prefix the one that seems fast would get jobs while others are idle; and of idle ones the best would get
every prompt that nobody knows, until its cache had lost what the next ones ask for."""

LEAST_SEQUENCE: Final = 0.01
"""Of a step, what each further sequence adds to it at least. That is measured as a small difference between steps, and
may be lost among whatever else makes them longer; but nothing is free, and a worker that thinks so would get all."""

STALL: Final = 0.25
"""How much of a prompt's work counts once more for each answer that runs beside it, which takes that much longer, and
for whoever comes next. With much less, a load that nearly fills the fleet has prefixes computed that others hold, which
fills it; with all of it, prompts that nobody knows go where few run rather than where little waits."""


BUSY_STEPS: Final = 1.5
"""Steps that a first token takes longer where others run: half of the one that is under way when the job comes, and the
one in which they are decoded beside the end of its prompt."""

COPIES: Final = 1.25
"""Workers that are worth having a prefix, for each of the jobs that begin with it and are under way at the same time.
With fewer, jobs with it find none that is idle, as arrivals come in crowds; with more, what others ask for is pushed
out."""

AHEAD_S: Final = 10.0
"""For so long what many ask for now is taken to be asked for as often."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a worker measured of itself; 0: not yet."""

    prefill_tok_s: float = 0.0
    """Prompt tokens that it computes in a second."""
    step_s: float = 0.0
    """A step that decodes one sequence."""
    sequence_s: float = 0.0
    """What each further sequence adds to a step."""
    fetch_tok_s: float = 0.0
    """Tokens of pages that it takes from the store in a second. 0: no store, or nothing fetched yet."""


DEFAULTS: Final = Rates(prefill_tok_s=1000.0, step_s=0.02, sequence_s=0.002)
"""For fleets in which nobody has measured anything."""


@dataclass(frozen=True, slots=True)
class Work:
    """A job that is to be placed. Counts of tokens."""

    prompt: int
    answer: int
    """What each of its answers is expected to have."""
    others: int
    """What an answer has on average: those that run already are taken for such."""
    choices: int = 1
    repeats: float = 0.0
    """Jobs a second that begin like this one, as far as the worker has it that has the most of it; 0 unless most do."""


class Candidate(NamedTuple):
    """A live worker of the wanted model, as a decision sees it. Counts of tokens."""

    worker: str
    incarnation: str
    state: str
    fingerprint: str
    """Of its model: workers that agree on it do the same work."""
    load: Load
    """Charged to it and not refunded."""
    rates: Rates = DEFAULTS
    """To reckon with (see ``level``)."""
    held: int = 0
    """Of the prompt, from its beginning on: what is in its cache, or will be when the job's turn comes."""
    stored: int = 0
    """Of the prompt, beyond those: what the page store has."""
    max_running: int = 0
    """Sequences that it runs at once; 0: not known."""
    kv_tokens: int = 0
    """Size of its pool; 0: not known."""
    used: int = 0
    """Of the pool, in use when it last told."""


class Cost(NamedTuple):
    """In seconds. A named tuple, like what else is made for each worker of each decision, as that takes a third of the
    time."""

    wait_s: float
    prefill_s: float
    fetch_s: float
    decode_s: float
    saved_s: float = 0.0
    """By a prefix that will be in one more place: to those who ask for it next."""

    @property
    def total_s(self) -> float:
        return self.wait_s + self.prefill_s + self.fetch_s + self.decode_s - self.saved_s


def fetched(candidate: Candidate) -> int:
    """Prompt tokens that the worker will take from the page store: all that are there, where it is worth it."""
    rates = candidate.rates
    return candidate.stored if rates.fetch_tok_s > rates.prefill_tok_s else 0


def cached(work: Work, candidate: Candidate) -> int:
    """Prompt tokens that the worker will find in its cache, by the rule of its engine: whole blocks, but the last token
    is always computed."""
    return min(candidate.held + fetched(candidate), work.prompt - 1)


def cost(work: Work, candidate: Candidate) -> Cost:
    """Of giving the job to the candidate."""
    rates, load, slots, pool = candidate.rates, candidate.load, candidate.max_running, candidate.kv_tokens
    fetch = fetched(candidate)
    computed = work.prompt - cached(work, candidate)
    running = load.sequences if not slots or load.sequences < slots else slots
    # What is shared by many is charged to each, and answers at their maximum, so that charges alone would fill a pool
    # that is nearly empty. What the worker told of itself is a second old, but it can't be more than what is charged.
    occupied = min(load.tokens, candidate.used + load.prefill)
    short = 0.0
    """What does not fit, as a share of what fits."""
    if slots and load.sequences + work.choices > slots:
        short = (load.sequences + work.choices) / slots - 1
    if pool and occupied and occupied + computed > pool:
        short = max(short, (occupied + computed - pool) / min(occupied, pool))
    step_s = rates.step_s + (running - 1) * rates.sequence_s if running else rates.step_s
    busy_s = BUSY_STEPS * step_s if running else 0.0
    # As long as an answer takes, all that runs now makes place once.
    lifetime_s = work.others * step_s
    prefill_s = computed / rates.prefill_tok_s
    own_s = work.answer * (rates.step_s + (running + work.choices - 1) * rates.sequence_s)
    others_s = running * work.choices * work.answer * rates.sequence_s + (running + 1) * STALL * prefill_s
    wait_s = load.prefill / rates.prefill_tok_s + busy_s + short * lifetime_s
    return Cost(wait_s, prefill_s, fetch / rates.fetch_tok_s if fetch else 0.0, own_s + others_s)


def takers(candidates: Sequence[Candidate], refused: Container[str]) -> list[int]:
    """Places of those that the job can be given to: ready, and not refused. `refused`: by incarnation."""
    return [at for at, each in enumerate(candidates) if each.state == READY and each.incarnation not in refused]


def costs_of(work: Work, candidates: Sequence[Candidate], refused: Container[str] = ()) -> list[Cost]:
    """Of giving the job to each of the candidates. `refused`: incarnations that can't, or should not, take it.

    For the job alone it is never worth computing anew what another worker holds, until that one's queue is as long. But
    what many ask for all the time keeps its few holders busy, while others are idle: so one more place for it is worth
    what it saves to each of those who come next, as much of it as then goes there. What a worker holds that takes no
    jobs is of no use to them.
    """
    found = [cost(work, each) for each in candidates]
    if not work.repeats:
        return found
    able = takers(candidates, refused)
    most = max((candidates[at].held for at in able), default=0)
    holders = [found[at].total_s for at in able if candidates[at].held >= most]
    if not most or len(holders) >= COPIES * work.repeats * min(holders):
        return found
    least, coming = min(holders), work.repeats * AHEAD_S / (len(holders) + 1)
    for at in able:
        if candidates[at].held < most:
            as_holder = cost(work, candidates[at]._replace(held=most)).total_s
            saved_s = min(coming * (least - as_holder), found[at].total_s - as_holder)
            found[at] = found[at]._replace(saved_s=max(saved_s, 0.0))
    return found


def level(kinds: Sequence[str], rates: Sequence[Rates]) -> list[Rates]:
    """The rates to reckon with, of workers of these kinds: those of one kind that are near their median become the
    median, as does what is not measured yet, and the others are taken for nearer to it; where nobody of a kind has
    measured, the median of all stands in, or else DEFAULTS. What a sequence adds to a step is the same share of it for
    all of a kind."""
    everyone = _median(rates, DEFAULTS)
    of_kind: defaultdict[str, list[Rates]] = defaultdict(list)
    for kind, own in zip(kinds, rates, strict=True):
        of_kind[kind].append(own)
    middles = {kind: _median(known, everyone) for kind, known in of_kind.items()}
    return [_leveled(own, middles[kind]) for kind, own in zip(kinds, rates, strict=True)]


def _median(known: Sequence[Rates], default: Rates) -> Rates:
    def of(values: Iterable[float], otherwise: float) -> float:
        measured = [value for value in values if value > 0]
        return median(measured) if measured else otherwise

    return Rates(
        prefill_tok_s=of((each.prefill_tok_s for each in known), default.prefill_tok_s),
        step_s=of((each.step_s for each in known), default.step_s),
        sequence_s=of((each.sequence_s for each in known), default.sequence_s),
        # Nobody fetches at another's rate: whether it has a store at all is its own affair.
        fetch_tok_s=0.0,
    )


def _leveled(own: Rates, middle: Rates) -> Rates:
    def near(value: float, common: float) -> float:
        return min(max(common, value / NEAR), value * NEAR) if value > 0 else common

    step_s = near(own.step_s, middle.step_s)
    return Rates(
        prefill_tok_s=near(own.prefill_tok_s, middle.prefill_tok_s),
        step_s=step_s,
        sequence_s=step_s * max(middle.sequence_s / middle.step_s, LEAST_SEQUENCE),
        fetch_tok_s=own.fetch_tok_s,
    )
