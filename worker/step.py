"""What goes into a step and what comes out: the seams between the engine, the model and the shell around them.

What a step makes one of for each sequence is a named tuple here, which takes a third of the time of a frozen dataclass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.block_hash import BlockHash
    from kvstore.page import PageName
    from worker.sampling.draw import Logits, TokenLogprobs
    from worker.scheduling.block import Event
    from worker.sequence import Finish


class StepRow(NamedTuple):
    """One sequence's share of a forward pass: the tokens to compute, and where their keys and values live.

    The lists belong to the engine: a runner reads them during the call and keeps neither.
    """

    token_ids: list[int]
    """Tokens to compute, at positions ``start`` to ``start + len(token_ids) - 1``. Never empty."""
    start: int
    """Position of the first one. Positions before it have been computed and are readable through the table."""
    block_table: list[int]
    """Block ids in order: position ``p`` lives in ``block_table[p // block_size]``, slot ``p % block_size``."""
    logits: int
    """After how many of the tokens, the last ones, the logits are wanted; 0: after none."""


class NotFinite(ArithmeticError):  # noqa: N818 - reads as a fact
    """A step left keys or values that are not finite in the pages of sequences that asked for no logits."""


class Runner(Protocol):
    """A model over a paged cache. Implemented by ``worker.model``; the engine knows nothing else of a model."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits. Token ids are below it."""

    @property
    def block_size(self) -> int:
        """Token positions per block."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the cache; ids are 0 to ``num_blocks - 1``."""

    def forward(self, rows: Sequence[StepRow]) -> Logits:
        """Run one step: write the rows' keys and values into their pages, attend to all positions before.

        Returns the logits, float32 ``[sum of the rows' logits, vocab_size]``, in the order of rows and positions; they
        hold until the next call. A row's result does not depend on the other rows. A call that raised may be repeated
        with the same rows: it writes the same values to the same slots.
        """

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, ``(from, to)`` each. No block is both copied from and copied to in one call."""


class PageMemory(Protocol):
    """A runner's pages as bytes: what a block holds leaves it, and comes back, to the bit. All runners of
    ``worker.model`` have this too."""

    @property
    def page_bytes(self) -> int:
        """Of one block, in all layers."""

    @property
    def page_layout(self) -> str:
        """Names how keys and values lie in these bytes, and their dtype: with it and the same fingerprint they mean the
        same everywhere."""

    def read_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        """What these blocks hold, ``page_bytes`` each, copied."""

    def write_blocks(self, blocks: Sequence[int], payloads: Sequence[bytes | memoryview]) -> None:
        """Make these blocks hold that. Raises ValueError, and writes nothing, for a payload of another size."""


class PagedRunner(Runner, PageMemory, Protocol):
    """A runner with its pages."""


class Spilled(NamedTuple):
    """A page that left the pool."""

    name: PageName
    payload: bytes


class Output(NamedTuple):
    """What one step produced for one choice of a request: a token, or the news that it has failed."""

    request_id: str
    choice: int
    start: int
    """Index of ``token_ids[0]`` among the choice's output tokens; without tokens, how many there are so far."""
    cached_tokens: int
    """Prompt tokens found in the prefix cache when the request was first admitted."""
    prompt_tokens: int
    completion_tokens: int
    """The choice's output tokens so far, this step's included."""
    token_ids: tuple[int, ...] = ()
    text: str = ""
    """Text that became certain in this step. The joined texts of all outputs are the whole text."""
    finish: Finish | None = None
    stop_match: str = ""
    """The stop string that ended the text, or empty."""
    stop_token: int | None = None
    """The token that ended the sequence, the last of ``token_ids``, if one did."""
    error: str = ""
    """With ``Finish.ERROR``: what went wrong, for the caller to read."""
    refused: bool = False
    """With ``Finish.ERROR``: the fault is the request's."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of ``token_ids``, if the request wants them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """With choice 0's first token: one for each of the prompt's tokens but the first, if the request wants them."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's state, and what it has counted since its start."""

    running: int
    waiting: int
    blocks_free: int
    blocks_cached: int
    blocks_used: int
    prefix_queried: int
    """Total of prompt tokens looked up in the prefix cache, each prompt once, at its first admission. Prompts whose own
    log-probabilities are wanted are not: they must be computed."""
    prefix_hit: int
    """Total of those that were found."""
    evictions: int
    """Total of cached blocks given up, for new content or because too many were cached."""
    preemptions: int
    """Total of times that a sequence was put back to wait, for lack of blocks or for one of higher priority."""
    displacements: int
    """Total of those for one of higher priority."""
    steps: int
    """Total of steps."""
    computed_tokens: int
    """Total of tokens scheduled for them."""
    output_tokens: int
    """Total of tokens that came out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats(EngineStats):
    """What a step did, and the state it left behind."""

    tokens: int
    """Tokens scheduled for this step. Fewer were computed where memory ran out or the model failed."""
    sequences: int
    """Sequences that took part in it."""
    decoded: int
    """Those of them that got one token. The other tokens are of prompts, or are recomputed."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The result of a step."""

    outputs: tuple[Output, ...]
    stats: StepStats
    failures: tuple[Exception, ...] = ()
    """What the runner raised in this step, with tracebacks, for the log. Empty in a healthy step. An exception is
    listed even when the retry went well and no sequence had to end."""
    events: tuple[Event, ...] = ()
    """What became of the pool's offers since the last step."""
    spilled: tuple[Spilled, ...] = ()
    """Pages of what was evicted since the last step, as far as there was leave to read them."""
    doubted: tuple[BlockHash, ...] = ()
    """Prefixes whose keys and values are in doubt: their pages must not be used, wherever they are."""
    admitted: tuple[str, ...] = ()
    """Requests that took part for the first time."""
