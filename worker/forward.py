"""Runs a schedule on the model, and finds out who it is that the model can't bear.

A pass that fails is tried again in halves, down to single sequences, so that of many only what fails alone fails. A
single sequence for which there is not enough memory is tried with half its tokens, down to one.
"""

from __future__ import annotations

import math
import traceback
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from worker.matching import MatchError
from worker.sampling.draw import Score
from worker.scheduling.plan import Scheduled
from worker.step import NotFinite, StepRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Sequence as Many

    from worker.sampling.draw import Draw, Drawn, Sampler, TokenLogprobs
    from worker.scheduling.plan import Schedule
    from worker.sequence import Sequence
    from worker.step import Runner

OUT_OF_MEMORY = ("can't allocate memory", "not enough memory")
"""What a RuntimeError of torch's says on a CPU. For other devices it has a class, which is known by its name here: a
runner need not bring torch along."""


class Result(NamedTuple):
    """What the model made of one entry of a schedule."""

    num_tokens: int
    """How many of its tokens were computed: all, or fewer when memory was short. None with an error."""
    drawn: Many[Drawn] = ()
    """The next tokens, when it is up to date: one, or one for each choice of a request that is still to be forked."""
    scores: Many[TokenLogprobs] = ()
    """Of the prompt's tokens from ``sequence.scored`` + 1 on."""
    error: str = ""
    poisoned: bool = False
    """With an error: the pages behind it can't be trusted."""
    refused: bool = False
    """With an error: the fault is the request's."""


@dataclass(slots=True)
class Ran:
    """What became of a schedule."""

    results: list[Result] = field(default_factory=list)
    """One for each entry."""
    failures: list[Exception] = field(default_factory=list)
    """All that was raised, also where it went well in a smaller pass."""
    out_of_memory: bool = False


class Forward:
    """The model and the sampler, one schedule at a time. Changes nothing but pages that nobody else reads yet."""

    def __init__(self, runner: Runner, sampler: Sampler, draws: Callable[[Sequence, int], Many[Draw]]) -> None:
        """``draws`` tells what is to be drawn for a sequence from a row of logits."""
        self._runner = runner
        self._sampler = sampler
        self._draws = draws

    def run(self, schedule: Schedule) -> Ran:
        """Copy what the schedule wants copied, then compute its entries."""
        ran = Ran()
        lost = self._copy(schedule.copies, ran) if schedule.copies else {}
        if not lost:
            ran.results = self._run(schedule.entries, ran) if schedule.entries else []
            return ran
        errors = [next((lost[b] for b in e.sequence.block_table if b in lost), "") for e in schedule.entries]
        sound = [entry for entry, error in zip(schedule.entries, errors, strict=True) if not error]
        results = iter(self._run(sound, ran) if sound else [])
        ran.results = [Result(0, error=error) if error else next(results) for error in errors]
        return ran

    def _copy(self, copies: Many[tuple[int, int]], ran: Ran) -> dict[int, str]:
        """Copy blocks, one by one if it doesn't work together. The blocks that nothing was copied to, and why."""
        try:
            self._runner.copy_blocks(copies)
        except Exception as failure:  # the runner may raise anything, and what doesn't need these copies must go on
            _note(failure, ran)
            if len(copies) == 1:
                return {copies[0][1]: _described(failure)}
        else:
            return {}
        return {block: error for pair in copies for block, error in self._copy([pair], ran).items()}

    def _run(self, entries: Many[Scheduled], ran: Ran) -> list[Result]:
        try:
            return self._pass(entries)
        except Exception as failure:  # as above
            short = _note(failure, ran)
            error, poisoned = _described(failure), isinstance(failure, NotFinite)
            refused = isinstance(failure, MatchError)
        # Out of the handler, so that nothing holds the failed pass's tensors any more.
        if len(entries) > 1:
            half = len(entries) // 2
            return self._run(entries[:half], ran) + self._run(entries[half:], ran)
        ((sequence, num_tokens),) = entries
        if short and num_tokens > 1:
            return self._run([Scheduled(sequence, num_tokens // 2)], ran)
        return [Result(0, error=error, poisoned=poisoned, refused=refused)]

    def _pass(self, entries: Many[Scheduled]) -> list[Result]:
        """One forward pass, with its drawing and scoring."""
        rows: list[StepRow] = []
        draws: list[Draw] = []
        scores: list[Score] = []
        counts: list[tuple[int, int]] = []
        logits_rows = 0
        for sequence, num_tokens in entries:
            start, num_scores, num_draws = sequence.num_computed, sequence.to_score(num_tokens), 0
            if num_scores:
                scores += _scores(sequence, logits_rows, num_scores)
                logits_rows += num_scores
            if num_tokens == sequence.num_uncomputed:
                own = self._draws(sequence, logits_rows)
                draws += own
                num_draws = len(own)
                logits_rows += 1
            tokens = sequence.tokens[start : start + num_tokens]
            rows.append(StepRow(tokens, start, sequence.block_table, num_scores + (num_draws > 0)))
            counts.append((num_draws, num_scores))
        logits = self._runner.forward(rows)
        expected = (logits_rows, self._runner.vocab_size)
        if tuple(logits.shape) != expected:
            raise RuntimeError(f"the model returned logits of shape {tuple(logits.shape)} instead of {expected}")
        drawn = iter(self._sampler.draw(logits, draws) if draws else ())
        scored = iter(self._sampler.score(logits, scores) if scores else ())
        return [
            _result(num_tokens, list(islice(drawn, num_draws)), list(islice(scored, num_scores)) if num_scores else ())
            for (_, num_tokens), (num_draws, num_scores) in zip(entries, counts, strict=True)
        ]


def _scores(sequence: Sequence, row: int, count: int) -> list[Score]:
    """The logits after a position tell of the token at the next one."""
    first, top = sequence.scored + 1, sequence.request.prompt_logprobs or 0
    return [Score(row + index, sequence.tokens[first + index], top) for index in range(count)]


def _result(num_tokens: int, drawn: list[Drawn], scores: Many[TokenLogprobs]) -> Result:
    for one in drawn:
        if one.token_id is None:
            return Result(0, error=one.error, poisoned=not one.finite)
    if any(math.isnan(score.logprob) for score in scores):
        return Result(0, error="non-finite logits", poisoned=True)
    return Result(num_tokens, drawn, scores)


def _note(failure: Exception, ran: Ran) -> bool:
    """Keep a failure, but nothing of what its frames held: the memory is wanted. Whether it was a lack of memory."""
    ran.failures.append(failure)
    short = False
    for cause in _causes(failure):
        traceback.clear_frames(cause.__traceback__)
        short = short or _is_out_of_memory(cause)
    ran.out_of_memory |= short
    return short


def _causes(failure: BaseException) -> Iterator[BaseException]:
    """A failure, and what led to it, each once."""
    seen: set[int] = set()
    cause: BaseException | None = failure
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def _is_out_of_memory(failure: BaseException) -> bool:
    if isinstance(failure, MemoryError):
        return True
    if not isinstance(failure, RuntimeError):
        return False
    return type(failure).__name__ == "OutOfMemoryError" or any(text in str(failure) for text in OUT_OF_MEMORY)


def _described(failure: Exception) -> str:
    return str(failure) if isinstance(failure, MatchError) else f"{type(failure).__name__}: {failure}"
