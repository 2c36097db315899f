"""A model without weights that takes the time of one: it has pages, reads and writes them, and sleeps.

Each position of a page holds a digest of the token there and of all before it, chained through the pages. What comes
next follows from the digests at all positions, as they are read through the block table. So tokens are the same
whichever way a text was computed, and others as soon as a table, a page or a copy is wrong.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from worker.model.room import room
from worker.model.simulated_text import END, VOCAB_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from worker.step import StepRow

    Digests = npt.NDArray[np.uint64]

LAYOUT: Final = "simulated/1"
"""Changes whenever pages or tokens may differ from those of an older version."""
DIGEST: Final = np.dtype("<u8")
"""What a page holds for each position."""

LETTERS: Final = np.frombuffer(b"etaoinshrdlucmfwypvbgketaoinshrdetaoinshetaoinetaeee            ", dtype=np.uint8)
"""Of 64 equally likely ones: answers look like words."""
LIKELY: Final = (0.0, -1.0, -2.0, -3.0)
"""Logits of the letters that may come next, the likeliest first. Two ranks may have one letter."""
UNLIKELY: Final = -20.0
"""Logits of all others."""
ENDS_AFTER: Final = 256
"""Tokens of an answer that is left to end by itself, on average."""

_MASK: Final = 2**64 - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_FIRST: Final = 0xBF58476D1CE4E5B9
_SECOND: Final = 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class Timing:
    """What a step takes: ``decode_s``, and what its prompt tokens and its further decoded sequences add to that."""

    prefill_tok_s: float
    """Prompt tokens in a second."""
    decode_s: float
    sequence_s: float = 0.0
    """For each sequence that gets one token, but the first."""

    def of(self, rows: Sequence[StepRow]) -> float:
        """Seconds that a step with these rows takes. A row of one token counts as decoded, any other as prompt."""
        decoded = sum(len(row.token_ids) == 1 for row in rows)
        prompt = sum(len(row.token_ids) for row in rows) - decoded
        return self.decode_s + self.sequence_s * max(0, decoded - 1) + prompt / self.prefill_tok_s


def sleep_until(moment: float) -> None:
    """Of the monotonic clock; returns at once when it is past."""
    left = moment - time.monotonic()
    if left > 0:  # else even a sleep of no time at all would give the processor away
        time.sleep(left)


class SimulatedRunner:
    """Implements ``worker.step.Runner``, with logits in numpy."""

    def __init__(
        self,
        timing: Timing,
        *,
        num_blocks: int,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = sleep_until,
    ) -> None:
        """``wait`` returns when ``clock`` tells the moment that it is given, or a later one."""
        self.vocab_size = VOCAB_SIZE
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.timing = timing
        self._clock = clock
        self._wait = wait
        with room(num_blocks, block_size, 2 * block_size * DIGEST.itemsize):
            self._pages = np.zeros((num_blocks, block_size), dtype=DIGEST)
            self._weights = 2 * np.arange(num_blocks * block_size, dtype=DIGEST) + 1
        """Of positions, so that digests in another order make another sum."""

    @property
    def page_bytes(self) -> int:
        """Of one block."""
        return self.block_size * DIGEST.itemsize

    @property
    def page_layout(self) -> str:
        """A digest for each position, in order."""
        return LAYOUT

    def forward(self, rows: Sequence[StepRow]) -> npt.NDArray[np.float32]:
        """Runs one step; returns float32 logits ``[sum of the rows' logits, VOCAB_SIZE]`` when its time is over.

        Raises:
            ValueError: a token, a block or a number of logits that there is not.
        """
        end = self._clock() + self.timing.of(rows)
        sums = []
        for row in rows:
            table = self._checked(row)
            self._write(row, table)
            if row.logits:
                sums += self._sums(row, table)
        logits = _logits(np.array(sums, dtype=DIGEST))
        self._wait(end)
        return logits

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks, ``(from, to)`` each."""
        sources, targets = map(list, zip(*pairs, strict=True))
        self._pages[targets] = self._pages[sources]

    def read_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        """What these blocks hold, ``page_bytes`` each."""
        return [self._pages[block].tobytes() for block in blocks]

    def write_blocks(self, blocks: Sequence[int], payloads: Sequence[bytes | memoryview]) -> None:
        """Makes these blocks hold that. Raises ValueError, and writes nothing, for a payload of another size."""
        if any(len(payload) != self.page_bytes for payload in payloads):
            raise ValueError(f"a block has {self.page_bytes} bytes")
        for block, payload in zip(blocks, payloads, strict=True):
            self._pages[block] = np.frombuffer(payload, dtype=DIGEST)

    def _checked(self, row: StepRow) -> npt.NDArray[np.int64]:
        """The blocks of a row's positions up to its last token."""
        tokens = row.token_ids
        if not 0 <= row.logits <= len(tokens) or not tokens:
            raise ValueError("a row has no tokens, or wants logits of more tokens than it has")
        if min(tokens) < 0 or max(tokens) >= VOCAB_SIZE:
            raise ValueError(f"a token id is not 0 to {VOCAB_SIZE - 1}")
        needed = -(-(row.start + len(tokens)) // self.block_size)
        table = np.array(row.block_table[:needed], dtype=np.int64)
        if len(table) < needed:
            raise ValueError("a block table is too short for its tokens")
        if table.view(np.uint64).max() >= self.num_blocks:  # below 0 is very large then
            raise ValueError(f"a block is not 0 to {self.num_blocks - 1}")
        return table

    def _write(self, row: StepRow, table: npt.NDArray[np.int64]) -> None:
        """Digests of a row's tokens, each made from the one before it, which is read from its page."""
        digest = 0
        if row.start:
            block, slot = divmod(row.start - 1, self.block_size)
            digest = self._pages.item(row.block_table[block], slot)
        digests = [digest := _mixed(digest ^ (token + 1) * _GOLDEN) for token in row.token_ids]
        if len(digests) == 1:
            block, slot = divmod(row.start, self.block_size)
            self._pages[row.block_table[block], slot] = digest
            return
        blocks, slots = divmod(np.arange(row.start, row.start + len(digests)), self.block_size)
        self._pages[table[blocks], slots] = digests

    def _sums(self, row: StepRow, table: npt.NDArray[np.int64]) -> list[int]:
        """Of the weighted digests at all positions up to each of the row's last ones, as its pages have them."""
        length = row.start + len(row.token_ids)
        digests, weights = self._pages[table].reshape(-1)[:length], self._weights[:length]
        if row.logits == 1:
            return [int(digests.dot(weights))]
        sums: list[int] = (digests * weights).cumsum()[length - row.logits :].tolist()
        return sums


def _mixed(number: int) -> int:
    """Spreads every bit over 64 (the end of SplitMix64)."""
    number &= _MASK
    number = (number ^ number >> 30) * _FIRST & _MASK
    number = (number ^ number >> 27) * _SECOND & _MASK
    return number ^ number >> 31


def _logits(sums: Digests) -> npt.NDArray[np.float32]:
    """``[len(sums), VOCAB_SIZE]``: what may come next after texts whose digests have these sums."""
    bits = (sums ^ sums >> np.uint64(30)) * np.uint64(_FIRST)
    bits = (bits ^ bits >> np.uint64(27)) * np.uint64(_SECOND)
    bits ^= bits >> np.uint64(31)
    logits = np.full((len(bits), VOCAB_SIZE), UNLIKELY, dtype=np.float32)
    every = np.arange(len(bits))
    for rank in reversed(range(len(LIKELY))):
        letters = LETTERS[bits >> np.uint64(6 * rank) & np.uint64(63)]
        logits[every, letters] = LIKELY[rank]
    ends = (bits >> np.uint64(32)) % np.uint64(ENDS_AFTER) == 0
    logits[ends, END] = LIKELY[0] + 1.0
    return logits
