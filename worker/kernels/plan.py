"""The index arithmetic of one step: which rows of which page each query reads, computed once for all layers.

A step's tokens are cut into *query tiles*: the tokens of one sequence whose positions fall into one aligned stretch of
``width`` positions. All tiles of one width and one padded key length run as one batch, so that there is no loop over
sequences. Two widths are enough: a wide one for chunks of a prompt, and a narrow one for decoding.

The number of keys that a tile is padded to follows from its place in its own sequence and from nothing else: not from
the batch, not from where a chunk began. So the products that make one token's result always have the same shape, and a
kernel that treats the matrices of a batch, and the rows of a matrix, alike gives that token the same bits every time.

::

    positions   0        32        64        96       128       160      a chunk of 100 tokens from position 20
                |---.----|---------|---------|-------.-|---------|
    tiles           [12  ][  32   ][   32   ][ 24   ]                    keys: 128 128 128 128
                                                                         the next token, alone: 1 tile, 128 keys
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from worker.kernels.linear import padded_rows
from worker.kernels.products import TILES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from worker.step import StepRow

    Ints = NDArray[np.int64]

KEY_TILE = 128
"""Keys are padded to a number of these. A block divides it, or it divides a block."""

_SIZES: Ints = np.array(sorted({base << shift for base in (1, 3) for shift in range(20)}), dtype=np.int64)
"""Key tiles that a query tile may be padded to: 1, 2, 3, 4, 6, 8, 12, 16, ... Few, so that batches are large."""


class Heads(NamedTuple):
    """What the indices of a layer depend on. Layers that agree in it share them."""

    kv_heads: int
    group: int
    """Query heads per key/value head."""
    window: int
    """Keys that a token sees, itself included; 0: all before it."""
    wide: int
    """Positions per query tile of a chunk: a power of two, at most `KEY_TILE`."""
    narrow: int
    """Positions per query tile of a few tokens: a power of two, at most ``wide``."""


class PoolShape(NamedTuple):
    """The pages of a layer: ``[num_blocks + 2, 2 * kv_heads, block_size, head_size]``, keys before values."""

    num_blocks: int
    block_size: int

    @property
    def trash(self) -> int:
        """The block that padding tokens write to. Never read."""
        return self.num_blocks

    @property
    def zeros(self) -> int:
        """The block that stands for keys past a sequence's end. Never written."""
        return self.num_blocks + 1


@dataclass(frozen=True, slots=True)
class TileBatch:
    """Query tiles of one width and one padded key length, of any sequences."""

    tiles: int
    width: int
    keys: int
    queries: torch.Tensor
    """int64 ``[tiles * kv_heads * width]``: rows of the queries seen as ``[tokens * kv_heads, group * head_size]``."""
    pages: torch.Tensor
    """int64 ``[2 * tiles * kv_heads * keys / block_size]``: rows of the pool seen as
    ``[blocks * 2 * kv_heads, block_size * head_size]``; all keys, then all values."""
    visible: torch.Tensor
    """bool ``[tiles, 1, width * group, keys]``."""
    bias: torch.Tensor
    """``[tiles, 1, width * group, keys]``, 0 where visible and -inf elsewhere; in the model's dtype."""


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What a layer needs to write its keys and values, to attend, and to put the results in order."""

    key_rows: torch.Tensor
    """int64 ``[tokens * kv_heads]``: rows of the pool seen as ``[blocks * 2 * kv_heads * block_size, head_size]``."""
    value_rows: torch.Tensor
    batches: tuple[TileBatch, ...]
    result_rows: torch.Tensor
    """int64 ``[tokens * heads]``: where each token's head is among the rows of all batches' results, which are laid out
    as ``[tiles, kv_heads, width, group]``."""


class StepPlan:
    """The tokens of a step, side by side, padded to a good number of rows for the products.

    Args:
        rows: one per sequence; their block tables must reach as far as their tokens.
        pool: the shape of the pages.
        dtype: of the model.
        device: where the tensors go.
        max_keys: gathered keys (tiles times padded keys) per batch, so that the space for them stays bounded.
        tiles: numbers of rows that the products run at a time, largest first.
    """

    def __init__(
        self,
        rows: Sequence[StepRow],
        pool: PoolShape,
        dtype: torch.dtype,
        device: torch.device,
        max_keys: int,
        tiles: tuple[int, ...] = TILES,
    ) -> None:
        self._pool = pool
        self._dtype = dtype
        self._device = device
        self._max_keys = max_keys
        self._start = np.array([row.start for row in rows], dtype=np.int64)
        self._count = np.array([len(row.token_ids) for row in rows], dtype=np.int64)
        self._end = self._start + self._count
        self._first = np.cumsum(self._count) - self._count
        self.real_tokens = int(self._count.sum())
        self.tokens = padded_rows(self.real_tokens, tiles)
        self._tiles = tiles
        self._tables = self._block_tables(rows)
        self._layers: dict[Heads, LayerPlan] = {}
        self._place_tokens(rows)
        self._choose_logits(rows)

    def layer(self, heads: Heads) -> LayerPlan:
        """The plan for layers with these heads; made once per step."""
        plan = self._layers.get(heads)
        if plan is None:
            plan = self._layers[heads] = _LayerPlanner(self, heads).build()
        return plan

    def owners(self, tokens: torch.Tensor) -> list[int]:
        """Which rows some of the step's tokens belong to, ascending, each once. ``tokens``: bool ``[tokens]``."""
        chosen = np.flatnonzero(tokens[: self.real_tokens].cpu().numpy())
        owners: list[int] = np.unique(np.searchsorted(self._first, chosen, side="right") - 1).tolist()
        return owners

    def tensor(self, values: NDArray[np.int64]) -> torch.Tensor:
        """``values`` on the step's device."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)

    def _block_tables(self, rows: Sequence[StepRow]) -> Ints:
        """``[rows, blocks]``: each row's blocks up to its last token, then the block of zeros."""
        used = -(-self._end // self._pool.block_size)
        tables = np.full((len(rows), int(used.max())), self._pool.zeros, dtype=np.int64)
        for index, row in enumerate(rows):
            tables[index, : used[index]] = row.block_table[: used[index]]
        return tables

    def _place_tokens(self, rows: Sequence[StepRow]) -> None:
        """Ids, positions and slots of all tokens, and the blocks that this step begins but does not fill."""
        size, padding = self._pool.block_size, self.tokens - self.real_tokens
        owner = np.repeat(np.arange(len(rows)), self._count)
        positions = np.arange(self.real_tokens) - self._first[owner] + self._start[owner]
        ids = np.fromiter((token for row in rows for token in row.token_ids), dtype=np.int64, count=self.real_tokens)
        self.token_ids = self.tensor(np.pad(ids, (0, padding)))[None]
        self.positions = self.tensor(np.pad(positions, (0, padding)))[None]
        self._blocks = np.pad(self._tables[owner, positions // size], (0, padding), constant_values=self._pool.trash)
        self._slots = np.pad(positions % size, (0, padding))
        last = self._end // size
        begun = (self._end % size > 0) & (last * size >= self._start)
        self.fresh_blocks = self.tensor(self._tables[np.flatnonzero(begun), last[begun]]) if begun.any() else None

    def _choose_logits(self, rows: Sequence[StepRow]) -> None:
        wanted = np.array([row.logits for row in rows], dtype=np.int64)
        owner = np.repeat(np.arange(len(rows)), wanted)
        inside = np.arange(len(owner)) - (np.cumsum(wanted) - wanted)[owner]
        chosen = (self._first + self._count - wanted)[owner] + inside
        self.logit_count = len(chosen)
        padding = padded_rows(self.logit_count, self._tiles) - self.logit_count if self.logit_count else 0
        self.logit_rows = self.tensor(np.pad(chosen, (0, padding)))


class _LayerPlanner:
    """Makes one `LayerPlan`. A tile's arrays have one entry per tile, in the order of rows and positions."""

    def __init__(self, step: StepPlan, heads: Heads) -> None:
        self.step = step
        self.heads = heads
        self.size = step._pool.block_size
        wide = heads.wide
        first, last = step._start // wide, (step._end - 1) // wide
        count = last - first + 1
        self.owner = np.repeat(np.arange(len(count)), count)
        index = np.arange(len(self.owner)) - (np.cumsum(count) - count - first)[self.owner]
        self.begin = np.maximum(index * wide, step._start[self.owner])
        self.count = np.minimum((index + 1) * wide, step._end[self.owner]) - self.begin
        tile = max(KEY_TILE, self.size)
        self.first_key = np.maximum(0, index * wide - heads.window + 1) // tile * tile if heads.window else index * 0
        spans = (index * wide // tile + 1) - self.first_key // tile
        self.keys = _SIZES[np.searchsorted(_SIZES, spans)] * tile
        self.width = np.where(self.count <= heads.narrow, heads.narrow, wide)

    def build(self) -> LayerPlan:
        """The plan, with its tensors on the step's device."""
        step, heads = self.step, self.heads
        lanes = np.arange(heads.kv_heads)
        key_rows = ((step._blocks * 2 * heads.kv_heads)[:, None] + lanes) * self.size + step._slots[:, None]
        first, stride = np.zeros((2, step.tokens), dtype=np.int64)
        batches: list[TileBatch] = []
        base = 0
        for chosen in self._batches():
            width = int(self.width[chosen[0]])
            tokens, inside = self._tokens(chosen, width)
            tile, lane = np.nonzero(inside)
            first[tokens[inside]] = base + (tile * heads.kv_heads * width + lane) * heads.group
            stride[tokens[inside]] = width * heads.group
            base += tokens.size * heads.kv_heads * heads.group
            batches.append(self._batch(chosen, width, tokens))
        result_rows = (first[:, None] + stride[:, None] * lanes)[:, :, None] + np.arange(heads.group)
        return LayerPlan(
            key_rows=step.tensor(key_rows.reshape(-1)),
            value_rows=step.tensor(key_rows.reshape(-1) + heads.kv_heads * self.size),
            batches=tuple(batches),
            result_rows=step.tensor(result_rows.reshape(-1)),
        )

    def _batches(self) -> list[Ints]:
        """Tile numbers, by width and keys, in batches that stay within the space for gathered keys."""
        result: list[Ints] = []
        kind = self.keys * (2 * KEY_TILE) + self.width
        for value in np.unique(kind):
            chosen = np.flatnonzero(kind == value)
            most = max(1, self.step._max_keys // int(self.keys[chosen[0]]))
            result.extend(chosen[at : at + most] for at in range(0, len(chosen), most))
        return result

    def _tokens(self, chosen: Ints, width: int) -> tuple[Ints, NDArray[np.bool_]]:
        """The step's token numbers in these tiles, ``[tiles, width]``, the last one repeated; and which are real."""
        lane = np.arange(width)
        owner, count = self.owner[chosen], self.count[chosen]
        first = self.step._first[owner] + self.begin[chosen] - self.step._start[owner]
        return first[:, None] + np.minimum(lane, count[:, None] - 1), lane < count[:, None]

    def _batch(self, chosen: Ints, width: int, tokens: Ints) -> TileBatch:
        step, heads = self.step, self.heads
        lanes = np.arange(heads.kv_heads)
        keys = int(self.keys[chosen[0]])
        blocks = self._blocks(chosen, keys)
        key_pages = blocks[:, None, :] * (2 * heads.kv_heads) + lanes[None, :, None]
        pages = np.concatenate((key_pages.reshape(-1), key_pages.reshape(-1) + heads.kv_heads))
        queries = tokens[:, None, :] * heads.kv_heads + lanes[None, :, None]
        positions = self.begin[chosen][:, None] + np.minimum(np.arange(width), self.count[chosen][:, None] - 1)
        visible = self._visible(positions, self.first_key[chosen], keys)
        bias = torch.zeros(visible.shape, dtype=step._dtype, device=step._device)
        return TileBatch(
            tiles=len(chosen),
            width=width,
            keys=keys,
            queries=step.tensor(queries.reshape(-1)),
            pages=step.tensor(pages),
            visible=visible,
            bias=bias.masked_fill_(~visible, -torch.inf),
        )

    def _blocks(self, chosen: Ints, keys: int) -> Ints:
        """``[tiles, keys / block_size]`` block ids. Past the last query's block: zeros, whatever is written there."""
        tables = self.step._tables
        index = self.first_key[chosen][:, None] // self.size + np.arange(keys // self.size)
        last = (self.begin[chosen] + self.count[chosen] - 1) // self.size
        found = tables[self.owner[chosen][:, None], np.minimum(index, tables.shape[1] - 1)]
        return np.where(index <= last[:, None], found, self.step._pool.zeros)

    def _visible(self, positions: Ints, first_key: Ints, keys: int) -> torch.Tensor:
        """bool ``[tiles, 1, width * group, keys]`` for queries at ``positions`` ``[tiles, width]``."""
        heads = self.heads
        query = self.step.tensor(np.repeat(positions - first_key[:, None], heads.group, axis=1))[:, None, :, None]
        key = torch.arange(keys, device=query.device)
        visible = key <= query
        return visible & (key > query - heads.window) if heads.window else visible
