"""The engine: requests in, one step at a time, outputs out.

Synchronous and pure: no clock, no I/O, no threads. One caller at a time; ``add`` and ``abort`` between steps.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Protocol

from kvstore.block_hash import root
from worker.params import AdmissionError
from worker.sequence import Finish, Sequence
from worker.step import EngineStats, Output, StepOutput, StepRow, StepStats

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from collections.abc import Sequence as Many

    import torch

    from worker.detokenize import TextStream
    from worker.params import SamplingParams, StopParams
    from worker.scheduler import Schedule, Scheduled, Scheduler
    from worker.sequence import Request
    from worker.step import Runner

__all__ = ["AdmissionError", "Engine", "EngineStats", "Output", "Sampler", "StepOutput", "StepStats"]

KNOWN_ROOTS = 1024
"""How many salts' hash roots are kept."""


class Sampler(Protocol):
    """``worker.sampler.sample``, or a stand-in for it."""

    def __call__(
        self, logits: torch.Tensor, params: Many[SamplingParams], positions: Many[int], choices: Many[int]
    ) -> list[int | None]: ...


@dataclass(slots=True, eq=False)
class _Live:
    """A sequence with the text made from it, which outlives preemptions."""

    sequence: Sequence
    text: TextStream
    reported: bool = False


@dataclass(frozen=True, slots=True)
class _Result:
    """What the model made of one entry: a token, or nothing yet, or an error."""

    token: int | None = None
    error: str = ""
    poisoned: bool = False
    """The pages it wrote can't be trusted."""


class Engine:
    """Runs requests to their end over one model."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        sampler: Sampler,
        text_stream: Callable[[StopParams], TextStream],
        eos_token_ids: Collection[int],
        fingerprint: str,
    ) -> None:
        """Run ``scheduler``'s sequences on ``runner``; both must have the same blocks.

        ``text_stream`` makes a detokenizer for one sequence (``TokenBytes.stream``). ``fingerprint`` names the model
        in the roots of block hashes.
        """
        pool = scheduler.pool
        if (runner.num_blocks, runner.block_size) != (pool.total, pool.block_size):
            raise ValueError(
                f"the model has {runner.num_blocks} blocks of {runner.block_size} tokens, "
                f"the pool {pool.total} of {pool.block_size}"
            )
        self._runner = runner
        self._scheduler = scheduler
        self._sampler = sampler
        self._text_stream = text_stream
        self._eos_token_ids = frozenset(eos_token_ids)
        self._root = lru_cache(maxsize=KNOWN_ROOTS)(partial(root, fingerprint, pool.block_size))
        self._live: dict[str, dict[int, _Live]] = {}

    @property
    def context_length(self) -> int:
        """Tokens that a prompt and its output may have together: the model's limit or the pool's, if that is less."""
        return self._scheduler.context_length

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def add(self, request: Request) -> None:
        """Take in a request. Raises AdmissionError when it could never run here."""
        request.check(self._runner.vocab_size)
        if request.request_id in self._live:
            raise AdmissionError(f"request {request.request_id!r} is running already")
        sequence = Sequence(request, root=self._root(request.salt), block_size=self._scheduler.pool.block_size)
        self._scheduler.add(sequence)
        self._live[request.request_id] = {0: _Live(sequence, self._text_stream(request.stopping))}

    def abort(self, request_id: str) -> bool:
        """End all choices of a request at once, without output. False when it is unknown or has ended."""
        choices = self._live.pop(request_id, None)
        if choices is None:
            return False
        for live in choices.values():
            self._scheduler.remove(live.sequence)
        return True

    def step(self) -> StepOutput:
        """Run one step. Every sequence that it brought up to date has an output in the result."""
        schedule = self._scheduler.schedule()
        results, failures = self._run(schedule)
        outputs = [
            output
            for entry, result in zip(schedule.entries, results, strict=True)
            if (output := self._apply(entry, result)) is not None
        ]
        stats = StepStats(**asdict(self.stats()), tokens=schedule.num_tokens, sequences=len(schedule.entries))
        return StepOutput(tuple(outputs), stats, tuple(failures))

    def stats(self) -> EngineStats:
        """The present state and the running totals. Between steps, like every other call."""
        scheduler, pool = self._scheduler, self._scheduler.pool
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            blocks_free=pool.free_count,
            blocks_cached=pool.cached_count,
            blocks_used=pool.used_count,
            prefix_queried=scheduler.prefix_queried,
            prefix_hit=scheduler.prefix_hit,
            evictions=pool.evictions,
            preemptions=scheduler.preemptions,
        )

    def check_integrity(self) -> None:
        """Between steps: raise IntegrityError unless all accounts agree."""
        self._scheduler.check_integrity()

    def _run(self, schedule: Schedule) -> tuple[list[_Result], list[Exception]]:
        """Run the model over a schedule. One that fails is retried entry by entry: only what fails alone ends."""
        entries = schedule.entries
        if not entries:
            return [], []
        try:
            return self._forward(entries), []
        except Exception as failure:  # the runner may raise anything, and its other sequences must go on
            if len(entries) == 1:
                return [_failed(failure)], [failure]
            failures = [failure]
        results = []
        for entry in entries:
            try:
                results += self._forward([entry])
            except Exception as failure:
                failures.append(failure)
                results.append(_failed(failure))
        return results, failures

    def _forward(self, entries: Many[Scheduled]) -> list[_Result]:
        """Forward pass and sampling. Changes nothing but pages that nobody else reads yet, so it may be repeated."""
        rows = [_row(entry) for entry in entries]
        logits = self._runner.forward(rows)
        sampled = [entry.sequence for entry, row in zip(entries, rows, strict=True) if row.logits]
        expected = (len(sampled), self._runner.vocab_size)
        if tuple(logits.shape) != expected:
            raise RuntimeError(f"the model returned logits of shape {tuple(logits.shape)} instead of {expected}")
        tokens = iter(
            self._sampler(
                logits,
                [sequence.request.sampling for sequence in sampled],
                [sequence.num_output for sequence in sampled],
                [sequence.choice for sequence in sampled],
            )
            if sampled
            else []
        )
        return [_sampled(next(tokens)) if row.logits else _Result() for row in rows]

    def _apply(self, entry: Scheduled, result: _Result) -> Output | None:
        """Record one entry's result. None when there is nothing to tell: a part of a prompt is done."""
        request = entry.sequence.request
        live = self._live[request.request_id][entry.sequence.choice]
        if result.error:
            if result.poisoned:
                self._scheduler.pool.forget(entry.sequence.block_table)
            return self._output(live, (), live.text.finish(), Finish.ERROR, result.error)
        self._scheduler.complete(entry)
        if result.token is None:
            return None
        return self._append(live, result.token)

    def _append(self, live: _Live, token: int) -> Output:
        sequence, stopping = live.sequence, live.sequence.request.stopping
        sequence.tokens.append(token)
        is_eos = token in self._eos_token_ids
        text = "" if is_eos else live.text.push((token,))
        finish = None
        if live.text.stop_match or (is_eos and not stopping.ignore_eos):
            finish = Finish.STOP
        elif sequence.num_output >= stopping.max_tokens or sequence.num_tokens >= self.context_length:
            finish = Finish.LENGTH
        if finish is not None:
            text += live.text.finish()
            # What was held back may turn out to complete a stop string at the very end.
            finish = Finish.STOP if live.text.stop_match else finish
        return self._output(live, (token,), text, finish)

    def _output(
        self, live: _Live, token_ids: tuple[int, ...], text: str, finish: Finish | None, error: str = ""
    ) -> Output:
        """Describe what happened to a sequence, and end it if that was the last of it."""
        sequence, request = live.sequence, live.sequence.request
        if finish is not None:
            self._end(sequence)
        first, live.reported = not live.reported, True
        return Output(
            request_id=request.request_id,
            choice=sequence.choice,
            start=sequence.num_output - len(token_ids),
            token_ids=token_ids,
            text=text,
            finish=finish,
            stop_match=live.text.stop_match,
            error=error,
            cached_tokens=sequence.cached_tokens or 0,
            prompt_tokens=sequence.num_prompt,
            completion_tokens=sequence.num_output,
            first=first,
        )

    def _end(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        choices = self._live[sequence.request.request_id]
        del choices[sequence.choice]
        if not choices:
            del self._live[sequence.request.request_id]


def _row(entry: Scheduled) -> StepRow:
    sequence, start = entry.sequence, entry.sequence.num_computed
    return StepRow(
        token_ids=sequence.tokens[start : start + entry.num_tokens],
        start=start,
        block_table=sequence.block_table,
        logits=int(entry.num_tokens == sequence.num_uncomputed),
    )


def _sampled(token: int | None) -> _Result:
    return _Result(error="non-finite logits", poisoned=True) if token is None else _Result(token=token)


def _failed(failure: Exception) -> _Result:
    return _Result(error=f"{type(failure).__name__}: {failure}")
