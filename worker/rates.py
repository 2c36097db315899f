"""How fast this worker is, for those who decide what it gets to do: from the steps that it makes.

A step that decodes ``d`` sequences and computes ``p`` prompt tokens beside them is taken to last

    step + sequence * max(d - 1, 0) + p / prefill

Steps without prompts tell the first two numbers; in the others, what is beyond these tells the third. Old steps are
forgotten as new ones come, so that the numbers follow what the worker does now: longer contexts, other neighbours. One
step that is held up by something else moves them little, and none of them ever is zero, negative or no number.

Pure: no clock. The first numbers come from passes at load (``worker.measure``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

DECODE_MEMORY: Final = 256
"""Of steps without prompts: an older one counts a third at most."""
PROMPT_MEMORY: Final = 64
"""Of steps with prompts, likewise."""
LEAST_PROMPT: Final = 16
"""Fewer prompt tokens than that are lost in what a step takes anyway."""
MOST_SURPRISE: Final = 4.0
"""A step counts as no more than so many times longer or shorter than expected. What lasts is learnt all the same."""
LEAST_SHARE: Final = 0.1
"""At least so much of a step is due to its prompt tokens; and to its first sequence."""
PRIOR_VARIANCE: Final = 1.0
"""What was measured at load about further sequences counts as much as steps whose numbers of them vary so much: where
all have about the same number, steps can't tell what one of them costs."""

LEAST_S: Final = 1e-6
MOST_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Measured:
    """What a lease tells. All are finite and above zero."""

    prefill_tok_s: float
    """Prompt tokens a second."""
    step_ms: float
    """A step that decodes one sequence."""
    sequence_ms: float
    """What each further sequence adds to it."""


UNMEASURED: Final = Measured(prefill_tok_s=1000.0, step_ms=20.0, sequence_ms=1.0)
"""A guess, until a worker that could not be measured has made some steps."""


class Rates:
    """Follows the steps of one worker."""

    def __init__(self, at_load: Measured) -> None:
        self._token_s = _bounded(1 / at_load.prefill_tok_s)
        self._sequence_s = self._prior_s = _bounded(at_load.sequence_ms / 1000)
        # Of steps without prompts, weighted by age: means of sequences beyond the first and of seconds, and how they
        # vary together. The steps before the first one are those of one sequence, as measured.
        self._mean_more = 0.0
        self._mean_s = _bounded(at_load.step_ms / 1000)
        self._variance = 0.0
        self._covariance = 0.0
        # Of steps with prompts, likewise: sums.
        self._prompt_tokens = 0.0
        self._prompt_s = 0.0
        self.busy_s = 0.0
        """Seconds that steps took in all, for operators: nothing is learnt from them."""

    @property
    def now(self) -> Measured:
        """As far as the steps so far tell."""
        return Measured(1 / self._token_s, 1000 * self._step_s, 1000 * self._sequence_s)

    def step(self, *, prompt_tokens: int, decoded: int, seconds: float) -> None:
        """Learn from a step that went well: ``decoded`` sequences got one token, the others ``prompt_tokens``."""
        if (
            not math.isfinite(seconds)
            or seconds <= 0
            or min(prompt_tokens, decoded) < 0
            or prompt_tokens + decoded == 0
        ):
            return
        more = max(decoded - 1, 0)
        base = self._step_s + self._sequence_s * more
        expected = base + self._token_s * prompt_tokens
        seconds = min(max(seconds, expected / MOST_SURPRISE), expected * MOST_SURPRISE)
        if prompt_tokens >= LEAST_PROMPT:
            self._learn_prompt(prompt_tokens, max(seconds - base, LEAST_SHARE * seconds))
        elif not prompt_tokens:
            self._learn_decode(more, seconds)

    @property
    def _step_s(self) -> float:
        return _bounded(self._mean_s - self._sequence_s * self._mean_more)

    def _learn_prompt(self, tokens: int, seconds: float) -> None:
        if not self._prompt_tokens:
            # What was measured at load counts as much as a full memory of steps like this one.
            self._prompt_tokens = float(tokens * PROMPT_MEMORY)
            self._prompt_s = self._prompt_tokens * self._token_s
        keep = 1 - 1 / PROMPT_MEMORY
        self._prompt_tokens = keep * self._prompt_tokens + tokens
        self._prompt_s = keep * self._prompt_s + seconds
        self._token_s = _bounded(self._prompt_s / self._prompt_tokens)

    def _learn_decode(self, more: int, seconds: float) -> None:
        """A line through the steps, by weighted least squares."""
        new = 1 / DECODE_MEMORY
        off_more, off_s = more - self._mean_more, seconds - self._mean_s
        self._mean_more += new * off_more
        self._mean_s += new * off_s
        self._variance = (1 - new) * (self._variance + new * off_more * off_more)
        self._covariance = (1 - new) * (self._covariance + new * off_more * off_s)
        slope = (self._covariance + PRIOR_VARIANCE * self._prior_s) / (self._variance + PRIOR_VARIANCE)
        # Not all of a step is due to its further sequences.
        most = (1 - LEAST_SHARE) * self._mean_s / self._mean_more if self._mean_more > 0 else MOST_S
        self._sequence_s = _bounded(min(slope, most))


def _bounded(seconds: float) -> float:
    return min(max(seconds, LEAST_S), MOST_S)
