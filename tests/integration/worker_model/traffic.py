"""Mixed requests over an engine: many at once through a small pool, and each alone on a cold one.

What the two give must be the same: tokens, text, log-probabilities to the last bit, the way it ended. A request that
was cancelled must have given a beginning of it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from worker.engine import Engine
from worker.kernels.native.library import best
from worker.params import SamplingParams, StopParams
from worker.sampling.sampler import sampler_for
from worker.scheduling.block_pool import BlockPool
from worker.scheduling.scheduler import Scheduler
from worker.sequence import Finish, Request

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from worker.detokenize import TokenBytes
    from worker.sampling.draw import TokenLogprobs
    from worker.step import EngineStats, Output, Runner, StepRow


@dataclass(frozen=True)
class Narrow:
    """The first blocks of a runner, for a smaller pool."""

    runner: Runner
    num_blocks: int

    @property
    def vocab_size(self) -> int:
        return self.runner.vocab_size

    @property
    def block_size(self) -> int:
        return self.runner.block_size

    def forward(self, rows: Sequence[StepRow]) -> torch.Tensor:
        return self.runner.forward(rows)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.runner.copy_blocks(pairs)


@dataclass(frozen=True)
class Sizes:
    """Of the requests, in tokens: all ranges include both ends."""

    vocab: int
    shared: int
    """Longest prefix that several requests begin with."""
    own: int
    output: int


@dataclass
class Answer:
    """One choice, joined from its outputs, which must follow one another without a gap."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None
    stop_match: str = ""
    stop_token: int | None = None

    def take(self, output: Output) -> None:
        assert not output.error, output.error
        assert self.finish is None, "an output after the last"
        assert output.start == len(self.token_ids), "a gap or a repeat"
        self.token_ids += output.token_ids
        self.text += output.text
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.finish, self.stop_match, self.stop_token = output.finish, output.stop_match, output.stop_token

    def begins(self, whole: Answer) -> bool:
        """Whether this is what ``whole`` was at some moment, or all of it."""
        return (
            self.token_ids == whole.token_ids[: len(self.token_ids)]
            and whole.text.startswith(self.text)
            and self.logprobs == whole.logprobs[: len(self.logprobs)]
            and self.prompt_logprobs in ([], whole.prompt_logprobs)
            and (self.finish is None or self == whole)
        )


Answers = dict[tuple[str, int], Answer]
"""By request and choice."""


def engine_over(
    runner: Runner,
    table: TokenBytes,
    *,
    eos_token_ids: Collection[int],
    context_length: int,
    max_running: int = 8,
    token_budget: int = 96,
    chunk_tokens: int = 48,
) -> Engine:
    """An engine with a cold pool of its own over a runner, whose pages may hold anything."""
    scheduler = Scheduler(
        BlockPool(runner.num_blocks, runner.block_size),
        max_running=max_running,
        token_budget=token_budget,
        chunk_tokens=chunk_tokens,
        context_length=context_length,
    )
    return Engine(
        runner,
        scheduler,
        sampler=sampler_for(torch.device("cpu"), best(2)),
        text_stream=table.stream,
        eos_token_ids=eos_token_ids,
        fingerprint="differential",
    )


def requests(count: int, sizes: Sizes, stops: Sequence[str], seed: int) -> list[Request]:
    """Prompts that share beginnings, some of them whole; parameters of every kind."""
    chance = random.Random(seed)
    heads = [[chance.randrange(3, sizes.vocab) for _ in range(sizes.shared)] for _ in range(4)]
    made: list[Request] = []
    for index in range(count):
        if made and chance.random() < 0.15:
            prompt = chance.choice(made).prompt
        else:
            head = chance.choice(heads)[: chance.randint(0, sizes.shared)]
            prompt = (*head, *(chance.randrange(3, sizes.vocab) for _ in range(chance.randint(1, sizes.own))))
        made.append(
            Request(
                f"r{index}",
                prompt,
                _sampling(chance, sizes.vocab),
                _stopping(chance, sizes, stops),
                salt=chance.choice(["", "", "", "tenant"]),
                n=chance.choice([1] * 8 + [2, 3]),
                priority=chance.choice([0] * 8 + [3, -3]),
                logprobs=chance.choice([None, None, 0, 4]),
                prompt_logprobs=chance.choice([None] * 7 + [2]),
            )
        )
    return made


def _sampling(chance: random.Random, vocab: int) -> SamplingParams:
    kind = chance.randrange(6)
    seed = chance.randrange(2**64)
    if kind < 2:
        return SamplingParams(temperature=0.0)
    if kind == 2:
        return SamplingParams(seed=seed)
    if kind == 3:
        return SamplingParams(temperature=0.8, top_p=0.9, min_p=0.02, seed=seed)
    if kind == 4:
        return SamplingParams(temperature=1.3, top_k=40, seed=seed, presence_penalty=0.5, frequency_penalty=0.5)
    bias = tuple((token_id, chance.uniform(-5, 5)) for token_id in sorted(chance.sample(range(vocab), 8)))
    return SamplingParams(temperature=chance.choice([0.0, 1.0]), seed=seed, repetition_penalty=1.2, logit_bias=bias)


def _stopping(chance: random.Random, sizes: Sizes, stops: Sequence[str]) -> StopParams:
    max_tokens = chance.randint(1, sizes.output)
    return StopParams(
        max_tokens,
        min_tokens=chance.choice([0, 0, max_tokens // 2]),
        stop=chance.choice([(), (), tuple(stops)]),
        stop_token_ids=tuple(chance.sample(range(3, sizes.vocab), chance.choice([0, 0, 3]))),
        ignore_eos=chance.random() < 0.5,
        include_stop=chance.random() < 0.3,
    )


@dataclass
class Crowd:
    """What became of many requests at once."""

    answers: Answers = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    stats: EngineStats | None = None
    steps: int = 0


def together(engine: Engine, asked: Sequence[Request], *, cancel: float, seed: int) -> Crowd:
    """All requests, arriving over time; with probability ``cancel`` a request is aborted, at a random step."""
    chance = random.Random(seed)
    crowd, waiting, live = Crowd(), list(reversed(asked)), set[str]()
    open_choices = {one.request_id: one.n for one in asked}
    doomed = {one.request_id: chance.randint(0, 12) for one in asked if chance.random() < cancel}
    while waiting or engine.has_work:
        while waiting and len(live) < 14 and chance.random() < 0.7:
            request = waiting.pop()
            engine.add(request)
            live.add(request.request_id)
        for name in sorted(live & doomed.keys()):
            doomed[name] -= 1
            if doomed[name] < 0:
                assert engine.abort(name)
                live.discard(name)
                crowd.cancelled.add(name)
        for output in engine.step().outputs:
            crowd.answers.setdefault((output.request_id, output.choice), Answer()).take(output)
            open_choices[output.request_id] -= output.finish is not None
        engine.check_integrity()
        live = {name for name in live if open_choices[name]}
        crowd.steps += 1
    crowd.stats = engine.stats()
    return crowd


def alone(engine: Engine, request: Request) -> Answers:
    """One request, on a pool that holds nothing."""
    engine._scheduler.pool.clear()
    engine.add(request)
    answers: Answers = {}
    while engine.has_work:
        for output in engine.step().outputs:
            answers.setdefault((output.request_id, output.choice), Answer()).take(output)
    return answers
