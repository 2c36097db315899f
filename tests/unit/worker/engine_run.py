"""Engines over a model that sees nothing but its pages, and what comes out of them, joined and checked for gaps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tests.unit.worker.paged_model import EOS, TABLE, VOCAB, Forced, PagedModel
from worker.engine import Engine
from worker.kernels.native.library import best
from worker.params import SamplingParams, StopParams
from worker.sampling.sampler import sampler_for
from worker.scheduling.block_pool import BlockPool
from worker.scheduling.scheduler import Scheduler
from worker.sequence import Finish, Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker.sampling.draw import TokenLogprobs
    from worker.step import Output, StepOutput

BS = 4
GREEDY = SamplingParams(temperature=0.0)


def engine_of(
    num_blocks: int = 64,
    *,
    max_running: int = 8,
    token_budget: int = 64,
    chunk_tokens: int | None = None,
    context_length: int = 200,
    cache_blocks: int | None = None,
    most_rows: int = 99,
    most_tokens: int = 9999,
    paging: bool = False,
) -> tuple[Engine, PagedModel]:
    model = PagedModel(num_blocks, BS, most_rows=most_rows, most_tokens=most_tokens)
    engine = engine_over(
        model,
        max_running=max_running,
        token_budget=token_budget,
        chunk_tokens=chunk_tokens,
        context_length=context_length,
        cache_blocks=cache_blocks,
        paging=paging,
    )
    return engine, model


def engine_over(
    model: PagedModel,
    *,
    max_running: int = 8,
    token_budget: int = 64,
    chunk_tokens: int | None = None,
    context_length: int = 200,
    cache_blocks: int | None = None,
    paging: bool = False,
) -> Engine:
    scheduler = Scheduler(
        BlockPool(model.num_blocks, model.block_size, cache_blocks),
        max_running=max_running,
        token_budget=token_budget,
        chunk_tokens=chunk_tokens,
        context_length=context_length,
    )
    return Engine(
        model,
        scheduler,
        sampler=sampler_for(torch.device("cpu"), best(2)),
        text_stream=TABLE.stream,
        eos_token_ids=[EOS],
        fingerprint="paged model",
        memory=model if paging else None,
    )


def forced(*tokens: Sequence[int]) -> Engine:
    """An engine whose model says these tokens after a prompt of 5: each choice the same, or each its own."""
    return engine_over(Forced(64, BS, script=[*tokens]))


def request(
    name: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 8,
    min_tokens: int = 0,
    sampling: SamplingParams = GREEDY,
    stop: tuple[str, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = True,
    include_stop: bool = False,
    salt: str = "",
    n: int = 1,
    priority: int = 0,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> Request:
    stopping = StopParams(max_tokens, min_tokens, stop, stop_token_ids, ignore_eos, include_stop)
    return Request(name, tuple(prompt), sampling, stopping, salt, n, priority, logprobs, prompt_logprobs)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Harmless tokens."""
    return torch.randint(4, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def ids(text: str) -> list[int]:
    """Tokens of a text, the longest first."""
    data, found = text.encode(), []
    while data:
        token = max((t for t in range(VOCAB) if TABLE[t] and data.startswith(TABLE[t])), key=lambda t: len(TABLE[t]))
        found.append(token)
        data = data[len(TABLE[token]) :]
    return found


@dataclass
class Answer:
    """All outputs of one choice, put together."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)

    def take(self, output: Output) -> None:
        assert self.finish is None, "an output after the last"
        assert output.start == len(self.token_ids), "a gap or a repeat"
        assert output.token_ids or output.finish is not None, "an output without news"
        assert not output.prompt_logprobs or (output.choice == 0 and not self.outputs)
        self.token_ids += output.token_ids
        self.text += output.text
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.outputs.append(output)
        assert output.completion_tokens == len(self.token_ids)
        assert (output.stop_token is None) or output.token_ids[-1:] == (output.stop_token,)
        assert (output.finish is Finish.ERROR) == bool(output.error)

    @property
    def last(self) -> Output:
        return self.outputs[-1]

    @property
    def finish(self) -> Finish | None:
        return self.last.finish if self.outputs else None

    @property
    def said(self) -> tuple[object, ...]:
        """All that must not depend on the neighbours, the chunks, the cache or the pool."""
        last = self.last
        ended = (last.finish, last.stop_match, last.stop_token, last.error, last.prompt_tokens)
        return self.token_ids, self.text, self.logprobs, self.prompt_logprobs, *ended


Answers = dict[tuple[str, int], Answer]
"""By request and choice."""


def step(engine: Engine, answers: Answers | None = None) -> StepOutput:
    result = engine.step()
    engine.check_integrity()
    if answers is not None:
        for output in result.outputs:
            answers.setdefault((output.request_id, output.choice), Answer()).take(output)
    return result


def finish_all(engine: Engine, answers: Answers | None = None) -> Answers:
    answers = {} if answers is None else answers
    for _ in range(5000):
        if not engine.has_work:
            assert engine.stats().blocks_used == 0
            return answers
        step(engine, answers)
    raise AssertionError("no end")


def solo(asked: Request) -> Answer:
    """The request alone, on an empty pool with room for everything, in as few steps as possible."""
    return solo_choices(asked)[0]


def solo_choices(asked: Request) -> list[Answer]:
    engine, _ = engine_of(256, token_budget=1000, max_running=99, context_length=1000)
    engine.add(asked)
    answers = finish_all(engine)
    return [answers[asked.request_id, choice] for choice in range(asked.n)]


def go_on(engine: Engine, asked: Request, answers: Answers) -> None:
    """Has an engine go on with a request from what was said of it so far."""
    name = asked.request_id
    told = {choice: answers[name, choice] for choice in range(asked.n) if (name, choice) in answers}
    said = {choice: answer.token_ids for choice, answer in told.items() if answer.finish is None}
    ended = {choice for choice, answer in told.items() if answer.finish is not None}
    engine.add(asked, said, ended)
    engine.check_integrity()


def run(engine: Engine, *asked: Request) -> list[Answer]:
    """The first choices' answers."""
    for one in asked:
        engine.add(one)
    answers = finish_all(engine)
    return [answers[one.request_id, 0] for one in asked]


def run_choices(engine: Engine, asked: Request) -> list[Answer]:
    engine.add(asked)
    answers = finish_all(engine)
    return [answers[asked.request_id, choice] for choice in range(asked.n)]
