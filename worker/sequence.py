"""A request, and its live state inside the engine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from kvstore.block_hash import child
from worker.params import MAX_PRIORITY, AdmissionError, check_token_ids

if TYPE_CHECKING:
    from kvstore.block_hash import BlockHash
    from worker.params import SamplingParams, StopParams


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
class Request:
    """A job, as the engine takes it in."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stopping: StopParams
    salt: str = ""
    """Prefixes are shared only under the same salt."""
    n: int = 1
    """Choices: so many answers to the one prompt, with randomness of their own."""
    priority: int = 0
    """The higher goes first; see ``worker.scheduler``."""
    logprobs: int | None = None
    """With each output token, its log-probability and those of so many of the likeliest. None: neither."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, but the first."""

    def check(self, vocab_size: int) -> None:
        """Raise AdmissionError on anything that no model with this vocabulary could run."""
        self.sampling.check(vocab_size)
        self.stopping.check(vocab_size)
        if not self.prompt:
            raise AdmissionError("the prompt is empty; it must have at least 1 token")
        check_token_ids("the prompt", (min(self.prompt), max(self.prompt)), vocab_size)
        if self.n < 1:
            raise AdmissionError(f"n is {self.n}; it must be at least 1")
        if abs(self.priority) > MAX_PRIORITY:
            raise AdmissionError(f"priority is {self.priority}; it must be -{MAX_PRIORITY} to {MAX_PRIORITY}")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and not 0 <= count <= vocab_size:
                raise AdmissionError(f"{name} is {count}; it must be 0 to the vocabulary's size, {vocab_size}")


class Sequence:
    """The live state of one choice of a request.

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
        "choice",
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

    def __init__(self, request: Request, *, root: BlockHash, block_size: int, choice: int = 0) -> None:
        self.request = request
        self.choice = choice
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
            f"Sequence({self.request.request_id!r}/{self.choice}, {self.status.value}, "
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
