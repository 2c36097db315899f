"""Random sequences over scattered, poisoned pages, and what attention over them should give, in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from worker.kernels.attention import PagedAttention
from worker.kernels.plan import PoolShape
from worker.step import StepRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker.kernels.cores import LayerSpec

CPU = torch.device("cpu")


@dataclass
class Text:
    """One sequence: its queries ``[tokens, heads, d]``, keys and values ``[tokens, kv_heads, d]``, and its blocks."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    table: list[int]
    done: int = 0
    results: list[torch.Tensor] = field(default_factory=list)

    def result(self) -> torch.Tensor:
        """``[tokens, heads, d]``, of all tokens so far."""
        return torch.cat(self.results)


class Book:
    """A pool whose every page holds NaN at first, and texts that are run through it in any pieces."""

    def __init__(self, spec: LayerSpec, dtype: torch.dtype, *, block_size: int, num_blocks: int, seed: int) -> None:
        self.spec, self.dtype = spec, dtype
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.attention = PagedAttention([spec], PoolShape(num_blocks, block_size), dtype, CPU)
        self.attention.pages[0][:num_blocks] = torch.nan
        self.free = list(range(num_blocks))
        self.random.shuffle(self.free)

    def text(self, tokens: int) -> Text:
        """A text of random content with blocks taken from all over the pool."""

        def draw(heads: int) -> torch.Tensor:
            return torch.randn(tokens, heads, self.spec.head_size, generator=self.generator).to(self.dtype)

        table = [self.free.pop() for _ in range(-(-tokens // self.attention.pool.block_size))]
        return Text(2 * draw(self.spec.heads), draw(self.spec.kv_heads), draw(self.spec.kv_heads), table)

    def again(self, text: Text) -> Text:
        """The same content in other blocks, from the start."""
        table = [self.free.pop() for _ in text.table]
        return Text(text.query, text.key, text.value, table)

    def step(self, share: Sequence[tuple[Text, int]]) -> None:
        """Runs so many next tokens of each text, side by side."""
        rows = [StepRow([0] * count, text.done, text.table, 1) for text, count in share]
        plan = self.attention.plan(rows)
        padding = plan.tokens - plan.real_tokens

        def side_by_side(name: str) -> torch.Tensor:
            parts = [getattr(text, name)[text.done : text.done + count] for text, count in share]
            joined = torch.cat([*parts, parts[0][:1].expand(padding, -1, -1)])
            return joined.transpose(0, 1)[None]

        self.attention.begin(plan)
        result = self.attention.attend(0, plan, side_by_side("query"), side_by_side("key"), side_by_side("value"))[0]
        assert result.shape == (plan.tokens, self.spec.heads, self.spec.head_size)
        assert torch.isfinite(result).all()
        at = 0
        for text, count in share:
            text.results.append(result[at : at + count].clone())
            text.done += count
            at += count

    def run(self, texts: Sequence[Text], pieces: Sequence[int]) -> None:
        """Runs all texts to their end, in random company, in pieces of random lengths out of ``pieces``."""
        while open_texts := [text for text in texts if text.done < len(text.query)]:
            company = self.random.sample(open_texts, self.random.randint(1, len(open_texts)))
            self.step([(text, min(self.random.choice(pieces), len(text.query) - text.done)) for text in company])


def oracle(spec: LayerSpec, text: Text) -> torch.Tensor:
    """Token by token, in float64: ``[tokens, heads, d]``."""
    query, key, value = (getattr(text, name).double() for name in ("query", "key", "value"))
    key, value = (given.repeat_interleave(spec.group, dim=1) for given in (key, value))
    results = []
    for position in range(len(query)):
        first = max(0, position - spec.window + 1) if spec.window else 0
        seen = slice(first, position + 1)
        scores = torch.einsum("hd,khd->hk", query[position], key[seen]) * spec.scaling
        if spec.softcap:
            scores = torch.tanh(scores / spec.softcap) * spec.softcap
        results.append(torch.einsum("hk,khd->hd", scores.softmax(-1), value[seen]))
    return torch.stack(results)
