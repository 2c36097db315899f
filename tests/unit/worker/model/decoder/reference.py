"""What a decoder computes, in plain torch: a whole text at once, each step as simple as it can be.

Driven by nothing but a shape, rotary tables and weights, so that it says what these mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker.model.decoder.config import DecoderShape, LayerShape
    from worker.model.decoder.weights import DecoderWeights, LayerWeights

Kept = Callable[[torch.Tensor], torch.Tensor]
Table = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, ``[positions, rotary_dim // 2]`` each."""


def logits(
    shape: DecoderShape,
    tables: Sequence[Table],
    weights: DecoderWeights,
    token_ids: Sequence[int],
    round_to: torch.dtype | None = None,
    kept: Kept | None = None,
) -> torch.Tensor:
    """The logits after each token of a text, float32 ``[len(token_ids), vocab]``.

    Everything is computed in float32. Given ``round_to``, what one operation hands to the next is rounded to that: the
    embedding, each norm, each product with a matrix (bias included), rotated queries and keys, what attention gives,
    gated values, and sums with the residual. Scores and their weights are not, nor are logits. ``kept`` is what becomes
    of keys and values, ``[heads, tokens, head_dim]``, on pages.
    """
    return _Reference(shape, tables, weights, round_to, kept).run(token_ids)


class _Reference:
    def __init__(
        self,
        shape: DecoderShape,
        tables: Sequence[Table],
        weights: DecoderWeights,
        round_to: torch.dtype | None,
        kept: Kept | None,
    ) -> None:
        self.shape = shape
        self.tables = tables
        self.weights = weights
        self.round_to = round_to
        self.kept = kept

    def run(self, token_ids: Sequence[int]) -> torch.Tensor:
        hidden = self.round(self.weights.embedding[list(token_ids)].float() * self.shape.embed_scale)
        for kind, layer in zip(self.shape.layers, self.weights.layers, strict=True):
            given = self.attention(kind, layer, self.norm(hidden, layer.input_norm))
            hidden = self.round(hidden + self.norm(given, layer.post_attention_norm))
            given = self.mlp(layer, self.norm(hidden, layer.mlp_norm))
            hidden = self.round(hidden + self.norm(given, layer.post_mlp_norm))
        return _capped(
            self.norm(hidden, self.weights.final_norm) @ self.weights.head.float().T, self.shape.logit_softcap
        )

    def attention(self, kind: LayerShape, layer: LayerWeights, hidden: torch.Tensor) -> torch.Tensor:
        shape, count = self.shape, len(hidden)
        made = self.product(hidden, layer.qkv, layer.qkv_bias).view(count, -1, shape.head_dim).transpose(0, 1)
        # Each [its heads, tokens, head_dim].
        query, key, value = torch.split(made, [shape.heads, shape.kv_heads, shape.kv_heads])
        query, key = self.norm(query, layer.q_norm), self.norm(key, layer.k_norm)
        if kind.rope >= 0:
            query, key = self.rotated(query, self.tables[kind.rope]), self.rotated(key, self.tables[kind.rope])
        if self.kept is not None:
            key, value = self.kept(key), self.kept(value)
        sharing = shape.heads // shape.kv_heads
        key, value = key.repeat_interleave(sharing, dim=0), value.repeat_interleave(sharing, dim=0)
        scores = _capped(query @ key.transpose(1, 2) * shape.attention_scale, shape.attention_softcap)
        back = torch.arange(count)[:, None] - torch.arange(count)[None, :]
        hidden_keys = (back < 0) | (back >= (kind.window or count))
        weighted = scores.masked_fill(hidden_keys, -torch.inf).softmax(dim=-1) @ value
        return self.product(self.round(weighted.transpose(0, 1).reshape(count, -1)), layer.output, layer.output_bias)

    def mlp(self, layer: LayerWeights, hidden: torch.Tensor) -> torch.Tensor:
        gate = self.product(hidden, layer.gate, layer.gate_bias)
        up = self.product(hidden, layer.up, layer.up_bias)
        active = F.silu(gate) if self.shape.activation == "silu" else F.gelu(gate, approximate="tanh")
        return self.product(self.round(active * up), layer.down, layer.down_bias)

    def norm(self, values: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Along the last dimension; without a weight nothing is done."""
        if weight is None:
            return values
        mean = values.square().mean(dim=-1, keepdim=True)
        return self.round(values * torch.rsqrt(mean + self.shape.norm_eps) * weight)

    def rotated(self, values: torch.Tensor, table: Table) -> torch.Tensor:
        """The first ``rotary_dim`` numbers of each head, in pairs that are half of that apart."""
        cos, sin = (part[: values.shape[1]] for part in table)
        half = self.shape.rotary_dim // 2
        first, second, rest = values[..., :half], values[..., half : 2 * half], values[..., 2 * half :]
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
        return self.round(turned)

    def product(self, values: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        made = values @ matrix.float().T
        return self.round(made if bias is None else made + bias)

    def round(self, values: torch.Tensor) -> torch.Tensor:
        return values if self.round_to is None else values.to(self.round_to).float()


def _capped(values: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(values / cap) if cap else values
