"""What a caller may ask for: how tokens are chosen, and when to end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

GREEDY_BELOW = 1e-5
"""Temperatures under this decode greedily."""

SEED_LIMIT = 2**64
"""Seeds are unsigned 64-bit numbers."""


class AdmissionError(ValueError):
    """A request that can't be served here, ever. The message names the value and the limit."""

    def __init__(self, message: str, limit: int | None = None) -> None:
        super().__init__(message)
        self.limit = limit
        """The bound that was broken, where it is a number that depends on this worker."""


class ReplayError(AdmissionError):
    """A request that can't go on from what is said to have been said before: that is no beginning of an answer."""


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. One object serves all choices of a request, and keeps what every step asks it.

    What changes the logits comes first, in this order: ``logit_bias``, the penalties, end tokens before ``min_tokens``.
    Then ``temperature`` scales them, and of the distribution that this gives ``top_k``, ``top_p`` and ``min_p`` each
    keep a part: a token is left when all three keep it.
    """

    temperature: float = 1.0
    """At least 0; under 1e-5 the most likely token is taken."""
    top_p: float = 1.0
    """In (0, 1]; keeps the fewest likeliest tokens that hold this share of what ``top_k`` left. 1 keeps all."""
    top_k: int = 0
    """Keeps this many of the likeliest. 0 keeps all; more than the vocabulary has does too."""
    min_p: float = 0.0
    """In [0, 1]; keeps what is at least this many times as likely as the likeliest. 0 keeps all."""
    seed: int = 0
    """Unsigned, 64 bits. With the choice and the token's index it determines all randomness."""
    repetition_penalty: float = 1.0
    """Above 0; logits of tokens in the prompt or the output are divided by it when positive, else multiplied."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token that the output has."""
    frequency_penalty: float = 0.0
    """Taken off the logit of every token, as often as the output has it."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and what is added to its logit; no id twice."""

    def check(self, vocab_size: int) -> None:
        """Raise AdmissionError on a value out of range."""
        _check_range("temperature", self.temperature, self.temperature >= 0, "at least 0")
        if not 0 < self.top_p <= 1:
            raise AdmissionError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.top_k < 0:
            raise AdmissionError(f"top_k is {self.top_k}; it must be at least 0")
        if not 0 <= self.min_p <= 1:
            raise AdmissionError(f"min_p is {self.min_p}; it must be 0 to 1")
        if not 0 <= self.seed < SEED_LIMIT:
            raise AdmissionError(f"seed is {self.seed}; it must be at least 0 and below 2^64")
        _check_range("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "above 0")
        _check_range("presence_penalty", self.presence_penalty, True, "any")
        _check_range("frequency_penalty", self.frequency_penalty, True, "any")
        check_token_ids("logit_bias", (token_id for token_id, _ in self.logit_bias), vocab_size)
        for token_id, bias in self.logit_bias:
            _check_range(f"logit_bias[{token_id}]", bias, True, "any")

    @cached_property
    def biases(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """``logit_bias`` in two columns, ids and what is added, ``[pairs]`` each. Only to be read."""
        ids = np.array([token_id for token_id, _ in self.logit_bias], dtype=np.int64)
        return ids, np.array([bias for _, bias in self.logit_bias], dtype=np.float64)

    @cached_property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without any randomness."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @cached_property
    def penalizes(self) -> bool:
        """Whether what was said before matters."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1


@dataclass(frozen=True, slots=True)
class StopParams:
    """When a sequence ends."""

    max_tokens: int
    min_tokens: int = 0
    """Until there are this many, no end token can be chosen and no stop string is looked for."""
    stop: tuple[str, ...] = ()
    """Strings that end the text before their first occurrence."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the sequence, as the model's own end tokens do; ``ignore_eos`` does not concern them."""
    ignore_eos: bool = False
    """The model's end tokens don't end the sequence."""
    include_stop: bool = False
    """The text keeps the stop string, or the stop token's text, that ended it."""

    def check(self, vocab_size: int) -> None:
        """Raise AdmissionError on a value out of range."""
        if self.max_tokens < 1:
            raise AdmissionError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise AdmissionError(f"min_tokens is {self.min_tokens}; it must be 0 to max_tokens, {self.max_tokens}")
        if "" in self.stop:
            raise AdmissionError("a stop string is empty; each must have at least one character")
        check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)


def check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise AdmissionError on an id that the vocabulary doesn't have."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise AdmissionError(f"{name} has token id {token_id}; ids are below {vocab_size}", vocab_size)


def _check_range(name: str, value: float, holds: bool, limit: str) -> None:
    if not (math.isfinite(value) and holds):
        raise AdmissionError(f"{name} is {value}; it must be a finite number, {limit}")
