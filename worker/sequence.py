"""A request, and its live state inside the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from kvstore.block_hash import child

if TYPE_CHECKING:
    from kvstore.block_hash import BlockHash

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


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Finish(Enum):
    """Why a sequence ended. One that was aborted has no reason: nobody waits for it."""

    STOP = "stop"
    """An end-of-sequence token or a stop string."""
    LENGTH = "length"
    """``max_tokens`` or the context's end."""
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen."""

    temperature: float = 1.0
    """At least 0; under 1e-5 the most likely token is taken."""
    top_p: float = 1.0
    """In (0, 1]; 1 keeps the whole distribution."""
    top_k: int = 0
    """0 keeps the whole distribution; more than the vocabulary has does too."""
    seed: int = 0
    """Unsigned, 64 bits. With the choice and the token's index it determines all randomness."""

    def check(self) -> None:
        """Raise AdmissionError on a value out of range."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise AdmissionError(f"temperature is {self.temperature}; it must be a finite number of at least 0")
        if not 0 < self.top_p <= 1:
            raise AdmissionError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.top_k < 0:
            raise AdmissionError(f"top_k is {self.top_k}; it must be at least 0")
        if not 0 <= self.seed < SEED_LIMIT:
            raise AdmissionError(f"seed is {self.seed}; it must be at least 0 and below 2^64")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without any randomness."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1


@dataclass(frozen=True, slots=True)
class StopParams:
    """When a sequence ends."""

    max_tokens: int
    stop: tuple[str, ...] = ()
    """Strings that end the text before their first occurrence."""
    ignore_eos: bool = False
    include_stop: bool = False
    """The text keeps the stop string that ended it."""

    def check(self) -> None:
        """Raise AdmissionError on a value out of range."""
        if self.max_tokens < 1:
            raise AdmissionError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if "" in self.stop:
            raise AdmissionError("a stop string is empty; each must have at least one character")


@dataclass(frozen=True, slots=True)
class Request:
    """One choice of a job, as the engine takes it in."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stopping: StopParams
    salt: str = ""
    """Prefixes are shared only under the same salt."""
    choice: int = 0

    def check(self, vocab_size: int) -> None:
        """Raise AdmissionError on anything that no model with this vocabulary could run."""
        self.sampling.check()
        self.stopping.check()
        if not self.prompt:
            raise AdmissionError("the prompt is empty; it must have at least 1 token")
        for token in (min(self.prompt), max(self.prompt)):
            if not 0 <= token < vocab_size:
                raise AdmissionError(f"the prompt has token id {token}; ids are below {vocab_size}", vocab_size)


class Sequence:
    """The live state of a request.

    ::

        tokens       | prompt ........................ | output so far ....... |
        positions    0                                 num_prompt              num_tokens
        num_computed |-- keys and values in pages ------------->|
        block_table  | b0 | b1 | b2 | ...                     bn |   covers at least num_computed positions
        num_sealed   |-- blocks offered to others ->|                counted in blocks

    There is no prefill and no decode: every step computes some of the tokens from ``num_computed`` on, and the step
    that catches up with ``num_tokens`` samples the next one.
    """

    __slots__ = (
        "block_size",
        "block_table",
        "cached_tokens",
        "hashes",
        "num_computed",
        "num_prompt",
        "num_sealed",
        "preemptions",
        "request",
        "root",
        "status",
        "tokens",
    )

    def __init__(self, request: Request, *, root: BlockHash, block_size: int) -> None:
        self.request = request
        self.root = root
        self.block_size = block_size
        self.tokens = list(request.prompt)
        self.num_prompt = len(request.prompt)
        self.num_computed = 0
        self.block_table: list[int] = []
        self.hashes: list[BlockHash] = []
        self.num_sealed = 0
        self.status = Status.WAITING
        self.cached_tokens: int | None = None
        self.preemptions = 0

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.request_id!r}/{self.request.choice}, {self.status.value}, "
            f"{self.num_computed} of {self.num_tokens} computed, blocks {self.block_table})"
        )

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose keys and values are still to be computed. At least 1 until the sequence has finished."""
        return len(self.tokens) - self.num_computed

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` positions take."""
        return -(-num_tokens // self.block_size)

    def block_tokens(self, index: int) -> tuple[int, ...]:
        """Token ids of the full block at ``index`` of the table."""
        start = index * self.block_size
        return tuple(self.tokens[start : start + self.block_size])

    def hash_blocks(self, count: int) -> list[BlockHash]:
        """Hashes of the first ``count`` blocks, which must be full. Each is computed once."""
        while len(self.hashes) < count:
            parent = self.parent_hash(len(self.hashes))
            self.hashes.append(child(parent, self.block_tokens(len(self.hashes))))
        return self.hashes[:count]

    def parent_hash(self, index: int) -> BlockHash:
        """Hash of the block before the one at ``index``; the root before the first."""
        return self.hashes[index - 1] if index else self.root
