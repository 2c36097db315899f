"""A model's place in the engine without a model: logits made beforehand, and clocks on the parts around it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from worker.__main__ import default_cache
from worker.detokenize import TokenBytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from worker.detokenize import TextStream
    from worker.params import StopParams
    from worker.sampling.draw import Draw, Drawn, Logits, Sampler, Score, TokenLogprobs
    from worker.step import StepRow

BANK = 64
"""Rows of logits that are made; a step's sequences get them in turn."""


class Clock:
    """Seconds spent in each of some parts, until they are taken."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def add(self, part: str, begin: float) -> None:
        """What has passed since ``begin``, as ``time.perf_counter`` tells it."""
        self.spent[part] = self.spent.get(part, 0.0) + time.perf_counter() - begin

    def take(self) -> dict[str, float]:
        """What has been spent since the last time."""
        spent, self.spent = self.spent, {}
        return spent


class StandIn:
    """Implements ``worker.step.Runner``: computes nothing, and gives the logits of a bank."""

    def __init__(self, bank: torch.Tensor, *, num_blocks: int, block_size: int, most_rows: int, clock: Clock) -> None:
        """``bank`` is float32 ``[any, vocabulary]``; a step asks for at most ``most_rows`` rows of logits."""
        self.vocab_size = bank.shape[1]
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._bank = bank
        self._logits = torch.empty(most_rows, bank.shape[1])
        self._clock = clock
        self._steps = 0

    def forward(self, rows: Sequence[StepRow]) -> torch.Tensor:
        """Other rows of the bank in each step, in memory that has just been written to, as a model's are."""
        begin = time.perf_counter()
        logits = self._next(sum(row.logits for row in rows))
        self._clock.add("model", begin)
        return logits

    def _next(self, count: int) -> torch.Tensor:
        self._steps += 1
        which = (torch.arange(count) + self._steps) % len(self._bank)
        return torch.index_select(self._bank, 0, which, out=self._logits[:count])

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """There are none to copy."""


class TimedSampler:
    """A sampler under a clock."""

    def __init__(self, sampler: Sampler, clock: Clock) -> None:
        self._sampler = sampler
        self._clock = clock

    def draw(self, logits: Logits, draws: Sequence[Draw]) -> list[Drawn]:
        begin = time.perf_counter()
        drawn = self._sampler.draw(logits, draws)
        self._clock.add("sampler", begin)
        return drawn

    def score(self, logits: Logits, scores: Sequence[Score]) -> list[TokenLogprobs]:
        begin = time.perf_counter()
        scored = self._sampler.score(logits, scores)
        self._clock.add("sampler", begin)
        return scored


class TimedText:
    """A detokenizer under a clock; in its place for all that the engine does with one."""

    def __init__(self, stream: TextStream, clock: Clock) -> None:
        self._stream = stream
        self._clock = clock

    @property
    def stop_match(self) -> str:
        return self._stream.stop_match

    def push(self, token_ids: Iterable[int]) -> str:
        begin = time.perf_counter()
        text = self._stream.push(token_ids)
        self._clock.add("text", begin)
        return text

    def finish(self, stop_token: int | None = None) -> str:
        begin = time.perf_counter()
        text = self._stream.finish(stop_token)
        self._clock.add("text", begin)
        return text


def timed_streams(table: TokenBytes, clock: Clock) -> Callable[[StopParams], TextStream]:
    """Makes detokenizers whose work is under a clock."""
    return lambda stopping: cast("TextStream", TimedText(table.stream(stopping), clock))


def peaked_logits(rows: int, vocabulary: int, seed: int) -> torch.Tensor:
    """Logits like a language model's, float32 ``[rows, vocabulary]`` with values that bfloat16 has.

    By Zipf's law with another exponent in each row, so that a token or two have nine tenths of one row's weight and
    thousands of another's. Low ids tend to be likelier, as the frequent tokens of a real vocabulary are.
    """
    numbers = torch.Generator().manual_seed(seed)
    exponents = 1 / (0.35 + 0.47 * torch.rand(rows, 1, generator=numbers))
    order = torch.randn(rows, vocabulary, generator=numbers) - 0.7 * torch.log(torch.arange(vocabulary) + 100.0)
    ranks = torch.empty(rows, vocabulary)
    falling = torch.arange(1, vocabulary + 1).float().log()
    ranks.scatter_(1, order.argsort(dim=-1, descending=True), falling.expand(rows, -1))
    return (20 - exponents * ranks).bfloat16().float()


def prepared_tokenizer() -> Path | None:
    """The tokenizer of the model that was prepared last on this machine, if there is one."""
    found = (Path(os.environ.get("OCTAVO_CACHE") or default_cache()).expanduser()).glob("models/*/tokenizer.json")
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def made_up_table(vocabulary: int) -> TokenBytes:
    """Tokens of one to eight letters, some of them only parts of a character."""
    letters = " etaoinshrdlué語"
    pieces = []
    for token_id in range(vocabulary):
        rest, piece = token_id, ""
        while not piece or rest:
            rest, letter = divmod(rest, len(letters))
            piece += letters[letter]
        pieces.append(piece.encode()[:-1] if token_id % 50 == 49 else piece.encode())
    return TokenBytes(pieces)
