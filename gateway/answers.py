"""How long answers are: what a job is expected to produce, from those that have ended."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from octavo.v1 import job_pb2

FIRST_GUESS: Final = 128.0
"""Tokens, while no answer of a model has ended."""
MEMORY: Final = 64
"""Of answers: an older one counts a third at most."""
MAX_MODELS: Final = 64


class Answers:
    """A running mean of the tokens of answers, by model. Bounded: what was not used for longest is forgotten."""

    def __init__(self) -> None:
        self._means: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def learn(self, model: str, tokens: float) -> None:
        """An answer has ended by itself or at its limit. The first ones replace the guess quickly."""
        count, mean = self._means.pop(model, (0, 0.0))
        count = min(count + 1, MEMORY)
        self._means[model] = count, mean + (tokens - mean) / count
        while len(self._means) > MAX_MODELS:
            self._means.popitem(last=False)

    def mean(self, model: str) -> int:
        """Tokens of an answer on average, at least 1."""
        _, mean = self._means.get(model, (0, FIRST_GUESS))
        return max(1, round(mean))

    def expected(self, job: job_pb2.Job) -> int:
        """Tokens that each of the job's answers will have, as far as anybody can tell."""
        stopping = job.stopping
        if stopping.ignore_eos and not stopping.stop and not stopping.stop_token_ids:
            return stopping.max_tokens
        return min(stopping.max_tokens, max(stopping.min_tokens, self.mean(job.model)))
