"""A model without weights that sees nothing but its pages.

Each slot of a page holds what a real model's keys and values depend on: the token and everything before it (as a
digest that is chained through the pages). The logits are a pure function of the digests that a row reads back through
its block table. So any error in a block table, in sharing, in sealing or in evicting shows: as an AssertionError here
where the history can't be real, as another output where it is someone else's.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from worker.detokenize import TokenBytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker.step import StepRow

VOCAB = 64
EOS = 1
POISON = 2
"""A forward pass that computes this token raises."""
NAN = 3
"""The logits of a sequence with this token in it are NaN."""

START = b"start"
DIGEST_BYTES = 8

# Some characters take several tokens, some tokens are several characters.
_TEXT = ["", "", "P", "N", "é", "語", "🙂"]
TABLE = TokenBytes(
    [
        *(piece.encode() for piece in _TEXT),
        *(bytes([byte]) for byte in "语🙂".encode()),
        *(b" " + bytes([letter]) for letter in b"abcdefghijklmnopqrstuvwxyz"),
        *(bytes([letter]) for letter in b"abcdefghijklmnopqrstuvwx"),
    ]
)
assert len(TABLE) == VOCAB


class PoisonError(RuntimeError):
    """The model can't compute this."""


@dataclass
class PagedModel:
    """Implements ``worker.step.Runner`` and ``PageMemory``."""

    num_blocks: int
    block_size: int
    vocab_size: int = VOCAB
    most_rows: int = 1_000_000
    """A pass over more rows than this runs out of memory."""
    most_tokens: int = 1_000_000
    """So does one over more tokens."""
    steps: list[list[StepRow]] = field(default_factory=list)
    """All passes that were tried."""
    made: dict[bytes, tuple[bytes, int]] = field(default_factory=dict)
    """Of each digest, the one before it and the token. Models that read each other's pages share it."""
    page_layout: str = "digests"

    def __post_init__(self) -> None:
        self._pages: list[list[bytes | None]] = [[None] * self.block_size for _ in range(self.num_blocks)]

    def forward(self, rows: Sequence[StepRow]) -> torch.Tensor:
        self.steps.append(list(rows))
        assert rows, "a pass over nothing"
        self._check_rows(rows)
        # All reads come before all writes: a block that this very pass fills must not be in another row's history.
        histories = [self._history(row, row.start) for row in rows]
        for row, history in zip(rows, histories, strict=True):
            self._write(row, history[-1] if history else START)
        # Half-way through, as in life: pages have been written by then.
        tokens = sum(len(row.token_ids) for row in rows)
        if len(rows) > self.most_rows or tokens > self.most_tokens:
            raise torch.OutOfMemoryError(f"{len(rows)} rows of {tokens} tokens don't fit")
        ends = [(row, row.start + len(row.token_ids)) for row in rows]
        wanted = [self._logits(row, end - back) for row, end in ends for back in reversed(range(row.logits))]
        return torch.stack(wanted) if wanted else torch.empty(0, self.vocab_size)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        sources, targets = {source for source, _ in pairs}, [target for _, target in pairs]
        assert len({*targets}) == len(targets)
        assert not sources & {*targets}
        for source, target in pairs:
            self._pages[target] = [*self._pages[source]]

    @property
    def page_bytes(self) -> int:
        return DIGEST_BYTES * self.block_size

    def read_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        return [b"".join(slot or bytes(DIGEST_BYTES) for slot in self._pages[block]) for block in blocks]

    def write_blocks(self, blocks: Sequence[int], payloads: Sequence[bytes | memoryview]) -> None:
        assert all(len(payload) == self.page_bytes for payload in payloads)
        for block, payload in zip(blocks, payloads, strict=True):
            for slot in range(self.block_size):
                self._pages[block][slot] = bytes(payload[DIGEST_BYTES * slot : DIGEST_BYTES * (slot + 1)])

    def tokens_of(self, payload: bytes) -> list[int]:
        """All tokens of the prefix that ends with a page."""
        tokens, digest = [], payload[-DIGEST_BYTES:]
        while digest != START:
            digest, token = self.made[digest]
            tokens.append(token)
        return tokens[::-1]

    def _check_rows(self, rows: Sequence[StepRow]) -> None:
        named = Counter(block for row in rows for block in row.block_table)
        for row in rows:
            end = row.start + len(row.token_ids)
            assert row.token_ids
            assert len(row.block_table) >= -(-end // self.block_size)
            assert len(set(row.block_table)) == len(row.block_table)
            for block in row.block_table[row.start // self.block_size :]:
                assert named[block] == 1, f"block {block} is written to while others read it"

    def _slot(self, row: StepRow, position: int) -> tuple[list[bytes | None], int]:
        return self._pages[row.block_table[position // self.block_size]], position % self.block_size

    def _history(self, row: StepRow, end: int) -> list[bytes]:
        """The digests at positions 0 to ``end - 1``, each of which must continue the one before."""
        history: list[bytes] = []
        for position in range(end):
            page, slot = self._slot(row, position)
            digest = page[slot]
            assert digest is not None, f"position {position} is read before it was written"
            before, _ = self.made[digest]
            assert before == (history[-1] if history else START), f"position {position} is someone else's"
            history.append(digest)
        return history

    def _write(self, row: StepRow, parent: bytes) -> None:
        for position, token in enumerate(row.token_ids, row.start):
            if token == POISON:
                raise PoisonError(f"position {position}")
            digest = hashlib.sha256(parent + token.to_bytes(4, "little")).digest()[:DIGEST_BYTES]
            self.made[digest] = parent, token
            page, slot = self._slot(row, position)
            page[slot] = parent = digest

    def _logits(self, row: StepRow, end: int) -> torch.Tensor:
        """After the token at position ``end - 1``."""
        history = self._history(row, end)
        if any(self.made[digest][1] == NAN for digest in history):
            return torch.full((self.vocab_size,), float("nan"))
        return _logits_after(history[-1], self.vocab_size)


@lru_cache(maxsize=20_000)
def _logits_after(digest: bytes, vocab_size: int) -> torch.Tensor:
    seed = int.from_bytes(digest, "little", signed=True)
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    logits[[POISON, NAN]] = -torch.inf  # only prompts have those
    return logits


@dataclass
class Forced(PagedModel):
    """Says what it is told to after a prompt of 5 tokens, all but surely."""

    script: Sequence[Sequence[int]] = ()
    """Continuations. What follows in those that a row agrees with so far is likely, in the first of them most."""

    def _logits(self, row: StepRow, end: int) -> torch.Tensor:
        said = [self.made[digest][1] for digest in self._history(row, end)][5:]
        if NAN in said:
            return torch.full((self.vocab_size,), float("nan"))
        logits = torch.zeros(self.vocab_size)
        fitting = [tokens for tokens in self.script if [*tokens[: len(said)]] == said and len(tokens) > len(said)]
        for rank, tokens in reversed([*enumerate(fitting)]):
            logits[tokens[len(said)]] = 100 - rank / 100
        return logits
