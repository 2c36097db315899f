"""Attention on gathered pages: two cores that compute the same thing, and the choice between them.

`reference` is plain PyTorch in float32, works on any device and knows soft-capping. `fused` is PyTorch's own flash
attention for the CPU, several times faster. Both get a token's keys in one shape that depends on its position alone
(see `worker.kernels.plan`), so what is left to ask of them is that the matrices of a batch and the rows of a matrix are
treated alike, and that narrow tiles give the bits of wide ones. `worker.kernels.methods` measures that.

On processors without AVX-512, the products that both are made of treat rows differently at the end of a matrix. There a
core only ever sees a few fixed numbers of rows (`in_pieces`), as products of weights do everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F  # noqa: N812

from worker.kernels.linear import cuts
from worker.kernels.plan import KEY_TILE

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker.kernels.plan import TileBatch

    Core = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, TileBatch, float, float], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one attention layer of a model is like."""

    heads: int
    kv_heads: int
    head_size: int
    scaling: float
    window: int = 0
    """Keys that a token sees, itself included; 0: all before it."""
    softcap: float = 0.0
    """Scores become ``softcap * tanh(scores / softcap)``; 0: they stay."""

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads


def reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: TileBatch, scaling: float, softcap: float
) -> torch.Tensor:
    """Attention in float32: ``query`` ``[n, h, rows, d]``, ``key`` and ``value`` ``[n, h, keys, d]`` -> like query.

    What no row of a tile may see does not reach the result, NaN included. Products are of one shape, whatever the
    number of keys: `KEY_TILE` of them at a time, added up in their order.
    """
    count, heads, rows, size = query.shape
    tiles = key.shape[2] // KEY_TILE
    keys = key.float().reshape(count * heads * tiles, KEY_TILE, size)
    queries = query.float().unsqueeze(2).expand(-1, -1, tiles, -1, -1).reshape(-1, rows, size)
    scores = torch.bmm(queries, keys.transpose(1, 2)) * scaling
    scores = scores.view(count, heads, tiles, rows, KEY_TILE).transpose(2, 3).reshape(count, heads, rows, -1)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    weights = torch.softmax(scores.masked_fill_(~batch.visible, -torch.inf), dim=-1)
    weights = weights.view(count, heads, rows, tiles, KEY_TILE).transpose(2, 3).reshape(-1, rows, KEY_TILE)
    seen = batch.visible.any(dim=-2).unsqueeze(-1)
    values = value.float().masked_fill(~seen, 0.0).reshape(count * heads * tiles, KEY_TILE, size)
    parts = torch.bmm(weights, values).view(count, heads, tiles, rows, size).unbind(2)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(query.dtype)


def fused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: TileBatch, scaling: float, softcap: float
) -> torch.Tensor:
    """The same in one call, on the CPU and without soft-capping. Every gathered key and value must be finite."""
    assert not softcap
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return cast("torch.Tensor", flash(query, key, value, attn_mask=batch.bias, scale=scaling)[0])


def never_alone(core: Core) -> Core:
    """``core``, given a lone matrix twice, where there are threads.

    Each matrix of several is one thread's work, but the products of a lone one are shared out among threads, which adds
    them up in another order.
    """

    def run(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: TileBatch, scaling: float, softcap: float
    ) -> torch.Tensor:
        if query.shape[0] * query.shape[1] > 1 or torch.get_num_threads() == 1:
            return core(query, key, value, batch, scaling, softcap)
        query, key, value = (given.expand(2, -1, -1, -1) for given in (query, key, value))
        bias, visible = (given.expand(2, -1, -1, -1) for given in (batch.bias, batch.visible))
        return core(query, key, value, replace(batch, tiles=2, bias=bias, visible=visible), scaling, softcap)[:1]

    return run


def in_pieces(core: Core, sizes: tuple[int, ...]) -> Core:
    """``core`` on pieces of the queries that have as many rows as ``sizes`` say, largest first; the last one padded."""

    def run(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: TileBatch, scaling: float, softcap: float
    ) -> torch.Tensor:
        rows = query.shape[2]
        extra = (0, 0, 0, -rows % sizes[-1])
        query, bias = F.pad(query, extra), F.pad(batch.bias, extra)
        visible = F.pad(batch.visible, extra, value=True)
        results = [
            core(
                query[:, :, start:stop],
                key,
                value,
                replace(batch, bias=bias[:, :, start:stop], visible=visible[:, :, start:stop]),
                scaling,
                softcap,
            )
            for start, stop in cuts(query.shape[2], sizes)
        ]
        return torch.cat(results, 2)[:, :, :rows]

    return run
