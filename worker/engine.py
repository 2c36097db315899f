"""The engine: requests in, one step at a time, outputs out.

Synchronous and pure: no clock, no I/O, no threads. One caller at a time; ``add`` and ``abort`` between steps.
"""

from __future__ import annotations

from functools import lru_cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from kvstore.block_hash import root
from worker.forward import Forward
from worker.live import LiveRequest
from worker.paging import Paging
from worker.params import AdmissionError
from worker.scheduling.block import IntegrityError
from worker.scheduling.plan import Scheduled
from worker.sequence import Sequence
from worker.step import EngineStats, StepOutput, StepStats

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from collections.abc import Sequence as Many

    from kvstore.block_hash import BlockHash
    from worker.detokenize import TextStream
    from worker.forward import Result
    from worker.live import LiveChoice
    from worker.params import StopParams
    from worker.sampling.draw import Draw, Drawn, Sampler
    from worker.scheduling.ages import Ages
    from worker.scheduling.block import Event
    from worker.scheduling.scheduler import Scheduler
    from worker.sequence import Request
    from worker.step import Output, PageMemory, Runner

KNOWN_ROOTS = 1024
"""How many salts' hash roots are kept."""
NOTHING_SAID: Final[Mapping[int, Many[int]]] = MappingProxyType({})
"""Of a request that begins."""


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
        memory: PageMemory | None = None,
    ) -> None:
        """Run ``scheduler``'s sequences on ``runner``; both must have the same blocks.

        ``text_stream`` makes a detokenizer for one sequence (``TokenBytes.stream``). ``fingerprint`` names the model
        in the roots of block hashes. With ``memory``, the runner again, blocks may leave as pages and come back.
        """
        pool = scheduler.pool
        if (runner.num_blocks, runner.block_size) != (pool.total, pool.block_size):
            raise ValueError(
                f"the model has {runner.num_blocks} blocks of {runner.block_size} tokens, "
                f"the pool {pool.total} of {pool.block_size}"
            )
        self._vocab_size = runner.vocab_size
        self._scheduler = scheduler
        self._forward = Forward(runner, sampler, self._draws)
        self._text_stream = text_stream
        self._eos_token_ids = frozenset(eos_token_ids)
        self._root = lru_cache(maxsize=KNOWN_ROOTS)(partial(root, fingerprint, pool.block_size))
        self.paging = None if memory is None else Paging(pool, memory)
        self._doubted: list[BlockHash] = []
        self._steps = self._computed_tokens = self._output_tokens = 0
        self._requests: dict[str, LiveRequest] = {}
        self._choices: dict[Sequence, LiveChoice] = {}

    @property
    def context_length(self) -> int:
        """Tokens that a prompt and its output may have together: the model's limit or the pool's, if that is less."""
        return self._scheduler.context_length

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def waiting(self) -> Iterable[Sequence]:
        """Sequences that wait for their admission: the line itself, to be looked through between steps."""
        return self._scheduler.waiting

    @property
    def ages(self) -> Ages:
        """How old blocks become in the pool. Their clock is the caller's: it sets ``now``, best before each step."""
        return self._scheduler.pool.ages

    def root_of(self, salt: str, tenant: str = "") -> BlockHash:
        """Where the prefixes of a tenant's requests with this salt begin."""
        return self._root(salt, tenant=tenant)

    def add(self, request: Request, said: Mapping[int, Many[int]] = NOTHING_SAID, ended: Collection[int] = ()) -> None:
        """Take in a request with all its choices. Raises AdmissionError when it could never run here.

        One that goes on, begun elsewhere or here, comes with the tokens that each choice has ``said``, and the choices
        that have ``ended``. Its outputs are those that it would have had next. Raises ReplayError when nothing can
        follow on that.
        """
        request.check(self._vocab_size)
        if request.request_id in self._requests:
            raise AdmissionError(f"request {request.request_id!r} is running already")
        live = LiveRequest(request, self._eos_token_ids, self._text_stream)

        def sequence_of(choice: int) -> Sequence:
            block_size = self._scheduler.pool.block_size
            root = self.root_of(request.salt, request.tenant)
            return Sequence(request, root=root, block_size=block_size, choice=choice)

        if ended or any(said.values()):
            sizes = {"vocab_size": self._vocab_size, "context_length": self.context_length}
            live.resume(said, ended, sequence_of, **sizes)
        else:
            live.open(sequence_of(0))
        for choice in live.choices.values():
            self._scheduler.add(choice.sequence)  # raises at the first of them, or not at all
        self._requests[request.request_id] = live
        self._choices |= {choice.sequence: choice for choice in live.choices.values()}

    def abort(self, request_id: str) -> bool:
        """End all choices of a request at once, without output. False when it is unknown or has ended."""
        live = self._requests.pop(request_id, None)
        if live is None:
            return False
        for choice in live.choices.values():
            self._scheduler.remove(choice.sequence)
            del self._choices[choice.sequence]
        return True

    def step(self) -> StepOutput:
        """Run one step. Every sequence that it brought up to date has an output in the result.

        When one choice fails, its request does: all choices that are still open have a last output with the error.
        """
        schedule = self._scheduler.schedule()
        if self.paging is not None:
            self.paging.rescue()
        ran = self._forward.run(schedule)
        if ran.out_of_memory:
            self._scheduler.shrink()
        outputs: list[Output] = []
        for entry, result in zip(schedule.entries, ran.results, strict=True):
            if result.error:
                outputs += self._fail(entry.sequence, result)
        for entry, result in zip(schedule.entries, ran.results, strict=True):
            choice = self._choices.get(entry.sequence)
            if choice is not None:  # else its request has just failed
                outputs += self._apply(choice, result)
        entries = schedule.entries
        self._steps += 1
        self._computed_tokens += schedule.num_tokens
        decoded = sum([entry.num_tokens == 1 for entry in entries])
        stats = StepStats(**self._figures(), tokens=schedule.num_tokens, sequences=len(entries), decoded=decoded)
        spilled, failures = self.paging.take() if self.paging is not None else ((), [])
        doubted, self._doubted = self._doubted, []
        told = tuple(ran.failures + failures)
        admitted = self._scheduler.take_admitted()
        return StepOutput(tuple(outputs), stats, told, self.take_events(), spilled, tuple(doubted), admitted)

    def take_events(self) -> tuple[Event, ...]:
        """What became of the pool's offers since the last step or call: aborts between steps may evict."""
        return self._scheduler.pool.take_events()

    def stats(self) -> EngineStats:
        """The present state and the running totals. Between steps, like every other call."""
        return EngineStats(**self._figures())

    def check_integrity(self) -> None:
        """Between steps: raise IntegrityError unless all accounts agree."""
        self._scheduler.check_integrity()
        scheduled = [*self._scheduler.running, *self._scheduler.waiting]
        if len(scheduled) != len(self._choices) or {*scheduled} != self._choices.keys():
            raise IntegrityError(f"the scheduler has {scheduled}, the engine {[*self._choices]}")
        owned = [choice for live in self._requests.values() for choice in live.choices.values()]
        if len(owned) != len(self._choices) or any(self._choices.get(each.sequence) is not each for each in owned):
            raise IntegrityError("requests and choices differ")
        for live in self._requests.values():
            live.check_integrity()

    def _figures(self) -> dict[str, Any]:
        scheduler, pool = self._scheduler, self._scheduler.pool
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "blocks_free": pool.free_count,
            "blocks_cached": pool.cached_count,
            "blocks_used": pool.used_count,
            "prefix_queried": scheduler.prefix_queried,
            "prefix_hit": scheduler.prefix_hit,
            "evictions": pool.evictions,
            "preemptions": scheduler.preemptions,
            "displacements": scheduler.displacements,
            "steps": self._steps,
            "computed_tokens": self._computed_tokens,
            "output_tokens": self._output_tokens,
        }

    def _draws(self, sequence: Sequence, row: int) -> list[Draw]:
        return self._choices[sequence].draws(row)

    def _fail(self, sequence: Sequence, result: Result) -> list[Output]:
        choice = self._choices.get(sequence)
        if choice is None:  # another choice of the request has failed in this step
            return []
        if result.poisoned:
            forgotten = self._scheduler.pool.forget(sequence.block_table)
            self._doubted += forgotten
            if self.paging is not None:
                self.paging.doubted.update(forgotten)
        outputs = choice.owner.fail(result.error, refused=result.refused)
        self.abort(sequence.request.request_id)
        return outputs

    def _apply(self, choice: LiveChoice, result: Result) -> list[Output]:
        """Record one entry's result. Empty when there is nothing to tell: a part of a prompt is done."""
        sequence, live = choice.sequence, choice.owner
        if result.scores:
            live.prompt_logprobs += result.scores
            sequence.scored += len(result.scores)
        self._scheduler.complete(Scheduled(sequence, result.num_tokens))
        if not result.drawn:
            return []
        choices = [choice]
        if live.unforked:
            for child in self._scheduler.fork(sequence, live.unforked):
                self._choices[child] = live.open(child)
                choices.append(self._choices[child])
            live.unforked = range(0)
        return [self._append(each, drawn) for each, drawn in zip(choices, result.drawn, strict=True)]

    def _append(self, choice: LiveChoice, drawn: Drawn) -> Output:
        output = choice.append(drawn, self.context_length)
        self._output_tokens += len(output.token_ids)
        if output.finish is not None:
            self._scheduler.remove(choice.sequence)
            del self._choices[choice.sequence]
            del choice.owner.choices[choice.sequence.choice]
            if not choice.owner.choices:
                del self._requests[output.request_id]
        return output
