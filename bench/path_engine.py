"""The engine in this process, under clocks: the same requests as the service gets, and what of a step goes where."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from bench.offline import BadAnswerError
from bench.standin import Clock, TimedSampler, TimedText
from worker.params import SamplingParams, StopParams
from worker.sequence import Request

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from octavo.v1 import inference_pb2
    from worker.detokenize import TextStream
    from worker.engine import Engine
    from worker.sampling.draw import Logits
    from worker.step import Runner, StepRow


@dataclass(frozen=True, slots=True)
class Ran:
    """What it took to answer some requests that were given at once. Seconds."""

    wall: float
    first_token: float
    """Until the first step that brought a token had ended."""
    first_parts: dict[str, float]
    """Of that step: `bench.path_figures.ENGINE_PARTS`."""
    parts: dict[str, float]
    """Of all steps, and with ``step`` the steps themselves."""


class TimedRunner:
    """Implements ``worker.step.Runner``: another one under a clock."""

    def __init__(self, runner: Runner, clock: Clock) -> None:
        self.vocab_size, self.block_size, self.num_blocks = runner.vocab_size, runner.block_size, runner.num_blocks
        self._runner = runner
        self._clock = clock

    def forward(self, rows: Sequence[StepRow]) -> Logits:
        begin = time.perf_counter()
        logits = self._runner.forward(rows)
        self._clock.add("model", begin)
        return logits

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        begin = time.perf_counter()
        self._runner.copy_blocks(pairs)
        self._clock.add("model", begin)


class TimedEngine:
    """Runs requests to their ends and tells where the time went."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._clock = Clock()
        # From inside: an engine in service has no clocks, and nowhere to put any.
        forward, make, clock = engine._forward, engine._text_stream, self._clock
        forward._runner = TimedRunner(forward._runner, clock)
        forward._sampler = TimedSampler(forward._sampler, clock)
        engine._text_stream = lambda stopping: cast("TextStream", TimedText(make(stopping), clock))

    def run(self, requests: Sequence[Request]) -> Ran:
        """Answers them all, given at once.

        Raises:
            BadAnswerError: a request failed.
        """
        whole = dict.fromkeys(("step", "model", "sampler", "text"), 0.0)
        first: tuple[float, dict[str, float]] | None = None
        begin = time.perf_counter()
        for request in requests:
            self._engine.add(request)
        while self._engine.has_work:
            self._clock.take()
            began = time.perf_counter()
            stepped = self._engine.step()
            ended = time.perf_counter()
            spent = {**dict.fromkeys(whole, 0.0), **self._clock.take(), "step": ended - began}
            whole = {part: seconds + spent[part] for part, seconds in whole.items()}
            for output in stepped.outputs:
                if output.error:
                    raise BadAnswerError(output.error)
            if stepped.outputs and first is None:
                first = ended - begin, spent
        wall = time.perf_counter() - begin
        if first is None:
            raise BadAnswerError("no step brought a token")
        return Ran(wall, first[0], named(first[1]), named(whole))


def named(spent: Mapping[str, float]) -> dict[str, float]:
    """The clock's parts under the table's names. What is neither model nor sampler nor text is the scheduler, the pool
    and the engine's accounts."""
    model, sample, text, step = (spent[part] for part in ("model", "sampler", "text", "step"))
    schedule = step - model - sample - text
    return {"schedule": schedule, "model": model, "sample": sample, "detokenise": text, "step": step}


def as_engine_takes_it(request: inference_pb2.GenerateRequest, name: str, prompt: Sequence[int]) -> Request:
    """A greedy request of `bench.workload`, with its prompt's tokens."""
    stopping = StopParams(max_tokens=request.stopping.max_tokens, ignore_eos=request.stopping.ignore_eos)
    return Request(name, tuple(prompt), SamplingParams(temperature=0.0), stopping, salt=request.cache_salt)
