"""A request, and its live state inside the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from kvstore.block_hash import child
from kvstore.limits import MAX_CHOICES, MAX_PRIORITY
from worker.params import AdmissionError, check_token_ids

if TYPE_CHECKING:
    from kvstore.block_hash import BlockHash
    from worker.matching import Grammar
    from worker.params import SamplingParams, StopParams


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Finish(Enum):
    """Why a sequence ended. One that was aborted has no reason: nobody waits for it."""

    STOP = "stop"
    """An end token of the model, a stop token or a stop string."""
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
    """Prefixes are shared only under the same salt, within one tenant."""
    n: int = 1
    """Choices: so many answers to the one prompt, with randomness of their own."""
    priority: int = 0
    """The higher goes first; see ``worker.scheduling.scheduler``."""
    logprobs: int | None = None
    """With each output token, its log-probability and those of so many of the likeliest. None: neither."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, but the first."""
    grammar: Grammar | None = field(default=None, repr=False, compare=False)
    """The form that each choice's text is to have, if any."""
    tenant: str = ""
    """Whose it is; empty: nobody's."""

    def check(self, vocab_size: int) -> None:
        """Raise AdmissionError on anything that no model with this vocabulary could run."""
        self.sampling.check(vocab_size)
        self.stopping.check(vocab_size)
        if not self.prompt:
            raise AdmissionError("the prompt is empty; it must have at least 1 token")
        check_token_ids("the prompt", (min(self.prompt), max(self.prompt)), vocab_size)
        if not 1 <= self.n <= MAX_CHOICES:
            raise AdmissionError(f"n is {self.n}; it must be 1 to {MAX_CHOICES}", MAX_CHOICES)
        if abs(self.priority) > MAX_PRIORITY:
            raise AdmissionError(f"priority is {self.priority}; it must be -{MAX_PRIORITY} to {MAX_PRIORITY}")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and not 0 <= count <= vocab_size:
                raise AdmissionError(f"{name} is {count}; it must be 0 to the vocabulary's size, {vocab_size}")
        if self.grammar is not None and self.stopping.ignore_eos:
            raise AdmissionError("ignore_eos is true; it must be false where the text has a form that ends it")


class Sequence:
    """The live state of one choice of a request.

    ::

        tokens       | prompt ........................ | output so far ....... |
        positions    0                                 num_prompt              num_tokens
        num_computed |-- keys and values in pages ------------->|
        block_table  | b0 | b1 | b2 | ...                     bn |   covers at least num_computed positions
        num_sealed   |-- offered, by it or before it ->|             counted in blocks
        scored       |-- logits used ->|                             counted in positions, never above num_prompt - 1

    There is no prefill and no decode: every step computes some of the tokens from ``num_computed`` on, and the step
    that catches up with ``num_tokens`` samples the next one.
    """

    __slots__ = (
        "announced",
        "awaits",
        "block_size",
        "block_table",
        "cached_tokens",
        "choice",
        "copy",
        "displacements",
        "hashes",
        "num_computed",
        "num_prompt",
        "num_sealed",
        "own_blocks",
        "preemptions",
        "private",
        "request",
        "root",
        "scored",
        "served",
        "standing",
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
        self.hashes: list[BlockHash] = []
        self.status = Status.WAITING
        self.scored = 0
        """Prompt positions whose logits have given the log-probability of the token after them."""
        self.cached_tokens: int | None = None
        """Prompt tokens found in the cache at the first admission; None before it."""
        self.preemptions = 0
        self.displacements = 0
        """Those of the preemptions that made place for a higher priority."""
        self.standing: tuple[float, int, int] = (0, 0, 0)
        """The lower goes first: see ``worker.scheduling.scheduler``."""
        self.served = 0
        """The last step that it took part in."""
        self.block_table: list[int] = []
        self.reset()

    def reset(self) -> None:
        """Forget all that goes with blocks, which have been given back."""
        self.num_computed = 0
        self.block_table = []
        self.num_sealed = 0
        self.private = False
        """Its blocks from ``num_sealed`` on can't be offered."""
        self.copy: tuple[int, int] | None = None
        """(from, to): a block to be copied before the next tokens are written to the copy, which is in the table. The
        other one is held until then."""
        self.announced = 0
        """So many of its first blocks others may wait for, if they aren't computed yet."""
        self.awaits: BlockHash | None = None
        """While it waits: a block that another sequence is computing, which will be a hit."""
        self.own_blocks = 0
        """While others may pass it: the blocks that they have to leave for it."""

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

    @property
    def unscored(self) -> int:
        """Prompt positions whose logits are still wanted; 0 when none ever were."""
        return 0 if self.request.prompt_logprobs is None else self.num_prompt - 1 - self.scored

    def to_score(self, num_tokens: int) -> int:
        """Of the next ``num_tokens`` uncomputed positions, how many have logits that are wanted for scores.

        They are the last ones of them, but for the prompt's last position if that is among them: it is drawn from.
        """
        if not self.unscored:
            return 0
        end = min(self.num_computed + num_tokens, self.num_prompt - 1)
        return max(0, end - max(self.num_computed, self.scored))

    def fork(self, choice: int) -> Sequence:
        """Another choice, at the end of the prompt, on the same blocks. The caller takes the references to them."""
        child = Sequence(self.request, root=self.root, block_size=self.block_size, choice=choice)
        child.hashes = self.hashes[: self.num_prompt // self.block_size]
        child.scored = self.num_prompt - 1  # the prompt's scores are told once, with the parent
        child.cached_tokens = self.cached_tokens
        child.num_computed = self.num_computed
        child.block_table = list(self.block_table)
        child.num_sealed = self.num_sealed
        child.private = self.private
        return child

    def held(self) -> list[int]:
        """All blocks that it has a reference on, in an order that ``BlockPool.free`` may take from the end."""
        return [*self.block_table, self.copy[0]] if self.copy else [*self.block_table]

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
            parent = self.hashes[-1] if self.hashes else self.root
            self.hashes.append(child(parent, self.block_tokens(len(self.hashes))))
        return self.hashes[:count]
