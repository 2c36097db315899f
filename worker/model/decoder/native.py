"""A decoder as the native kernels take it: packed weights, and the structures of ``structures.h``."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F  # noqa: N812 - as everywhere

from worker.kernels.native import memory
from worker.kernels.native.library import address
from worker.model.room import room

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker.model.decoder.config import DecoderShape, LayerShape
    from worker.model.decoder.weights import DecoderWeights, LayerWeights

LANES: Final = 16
UNIT: Final = 32
HEAD_STEP: Final = 32
"""As in ``weights.h`` and ``pages.h``."""

PACK: Final = {torch.int8: 4, torch.bfloat16: 2, torch.float32: 1}
"""Inputs that are multiplied together; see ``kinds.h`` and ``integers.h``."""
STEP: Final = {torch.int8: 64, torch.bfloat16: 32, torch.float32: 32}
"""To multiples of what inputs are padded."""

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


class Weight(ctypes.Structure):
    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("corrections", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        ("input_norm", ctypes.c_void_p),
        ("qkv", Weight),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("output", Weight),
        ("post_attention_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("gate_up", Weight),
        ("down", Weight),
        ("post_mlp_norm", ctypes.c_void_p),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("window", ctypes.c_int64),
        ("pages", ctypes.c_void_p),
    )


class Decoder(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("is_float32", "hidden", "heads", "kv_heads", "head_dim")),
        *((name, ctypes.c_int64) for name in ("intermediate", "rotary_dim", "activation")),
        *((name, ctypes.c_float) for name in ("norm_eps", "embed_scale", "attention_scale")),
        *((name, ctypes.c_float) for name in ("attention_softcap", "logit_softcap")),
        ("eight_bit_pages", ctypes.c_int32),
        ("block_size", ctypes.c_int64),
        ("embedding", ctypes.c_void_p),
        ("layers", ctypes.POINTER(Layer)),
        ("layer_count", ctypes.c_int64),
        ("final_norm", ctypes.c_void_p),
        ("head", Weight),
    )


class Step(ctypes.Structure):
    _fields_ = (
        ("run", ctypes.c_void_p),
        ("decoder", ctypes.POINTER(Decoder)),
        ("rows", ctypes.c_int64),
        ("token_ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("sequences", ctypes.c_int64),
        ("first_rows", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("table_starts", ctypes.c_void_p),
        ("wanted", ctypes.c_int64),
        ("wanted_rows", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("logits_stride", ctypes.c_int64),
        ("damaged", ctypes.c_void_p),
        ("nanoseconds", ctypes.c_void_p),
        ("readings", ctypes.c_void_p),
    )


SECTIONS: Final = (
    *("prepare", "embed", "norm", "halve", "qkv", "write", "attend", "output", "gate_up", "down", "head"),
)
"""Parts of a step whose time can be measured; ``Section`` of ``watch.h``."""


def padded(count: int, step: int) -> int:
    return -(-count // step) * step


def packed_shape(matrix: torch.Tensor, dtype: torch.dtype) -> tuple[int, ...]:
    """Of what ``[outputs, inputs]`` becomes: ``[units, inputs / PACK, 2, 16, PACK]``, padded to whole ones."""
    outputs, inputs = matrix.shape
    return (padded(outputs, UNIT) // UNIT, padded(inputs, STEP[dtype]) // PACK[dtype], 2, LANES, PACK[dtype])


def pack(matrix: torch.Tensor, out: torch.Tensor) -> None:
    """Write a matrix in that layout, with zeros for what it lacks."""
    outputs, inputs = matrix.shape
    units, packs, _, _, size = out.shape
    whole = F.pad(matrix, (0, packs * size - inputs, 0, units * UNIT - outputs))
    out.copy_(whole.view(units, 2, LANES, packs, size).permute(0, 3, 1, 2, 4))


def block_numbers(shape: DecoderShape, block_size: int, *, eight_bit_pages: bool) -> int:
    """Numbers of a layer's part of a block; in eight bits those are bytes, with a float32 scale for each head's."""
    scale = torch.float32.itemsize if eight_bit_pages else 0
    return shape.kv_heads * 2 * block_size * (padded(shape.head_dim, HEAD_STEP) + scale)


def quantized(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in eight bits, -127 to 127, and what each output's have to be multiplied by, float32 ``[outputs]``."""
    whole = matrix.float()
    scales = whole.abs().amax(dim=1) / 127
    scales = torch.where(scales > 1e-30, scales, 0.0)  # so little counts nothing: its inverse would be infinite
    steps = torch.where(scales > 0, 1 / scales, 0.0)
    return (whole * steps[:, None]).round_().to(torch.int8), scales


def interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Sixteen rows of one, then the sixteen of the other that they belong to, and so on; padded with zeros."""
    rest = padded(len(gate), LANES) - len(gate)
    halves = [F.pad(part, (0, 0) * (part.ndim - 1) + (0, rest)).view(-1, LANES, *part.shape[1:]) for part in (gate, up)]
    return torch.cat(halves, dim=1).flatten(0, 1)


class NativeModel:
    """A decoder's weights in the memory layout of the kernels, with its pages.

    Args:
        shape: what is computed.
        weights: read from files; not used afterwards.
        tables: cosines and sines, for each of ``shape.ropes``.
        num_blocks: of the pages.
        block_size: a multiple of sixteen.
        quantized: the layers' matrices are kept in eight bits. The embedding and the head (which would cost as much
            likeness as all layers together) are not.
        eight_bit_pages: so are keys and values, each head's of a position with a scale of its own.
    """

    def __init__(
        self,
        shape: DecoderShape,
        weights: DecoderWeights,
        tables: Sequence[tuple[torch.Tensor, torch.Tensor]],
        *,
        num_blocks: int,
        block_size: int,
        quantized: bool = False,
        eight_bit_pages: bool = False,
    ) -> None:
        assert block_size % LANES == 0, block_size
        self.dtype: Final = weights.embedding.dtype
        self.weights_dtype: Final = torch.int8 if quantized else self.dtype
        self.head: Final = padded(shape.head_dim, HEAD_STEP)
        """Numbers that a head takes in pages, padded."""
        self.pages_dtype: Final = torch.int8 if eight_bit_pages else self.dtype
        """What keys and values are kept as."""
        size = block_numbers(shape, block_size, eight_bit_pages=eight_bit_pages)
        with room(num_blocks, block_size, len(shape.layers) * size * self.pages_dtype.itemsize):
            self.pages: Final = memory.zeros(len(shape.layers), num_blocks, size, dtype=self.pages_dtype)
        """``[layers, blocks, numbers of a block]``; see ``pages.h``. In eight bits: bytes, those of scales too."""
        # A copy, since what was read may be mapped from a file, which somebody might cut short.
        self.embedding: Final = memory.zeros(*weights.embedding.shape, dtype=self.dtype)
        """``[vocab, hidden]``: one row for each token."""
        self.embedding.copy_(weights.embedding)
        self._kept: list[object] = []  # what the structures point to
        layers = [
            self._layer(shape, layer, weights.layers[index], tables, self.pages[index])
            for index, layer in enumerate(shape.layers)
        ]
        array = (Layer * len(layers))(*layers)
        self._kept.append(array)
        self.decoder: Final = Decoder(
            is_float32=self.dtype == torch.float32,
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            intermediate=shape.intermediate,
            rotary_dim=shape.rotary_dim,
            activation=_ACTIVATIONS[shape.activation],
            norm_eps=shape.norm_eps,
            embed_scale=shape.embed_scale,
            attention_scale=shape.attention_scale,
            attention_softcap=shape.attention_softcap,
            logit_softcap=shape.logit_softcap,
            eight_bit_pages=eight_bit_pages,
            block_size=block_size,
            embedding=address(self.embedding, self.dtype, shape.vocab, shape.hidden),
            layers=array,
            layer_count=len(layers),
            final_norm=self._keep(weights.final_norm, shape.hidden),
            head=self._weights(self.dtype, (weights.head, None))[0],
        )

    def _layer(
        self,
        shape: DecoderShape,
        layer: LayerShape,
        weights: LayerWeights,
        tables: Sequence[tuple[torch.Tensor, torch.Tensor]],
        pages: torch.Tensor,
    ) -> Layer:
        heads = weights.output.view(shape.hidden, shape.heads, shape.head_dim)
        output = F.pad(heads, (0, self.head - shape.head_dim)).flatten(1)
        turned = tables[layer.rope] if layer.rope >= 0 else (None, None)
        gate_up_bias = None
        if weights.gate_bias is not None and weights.up_bias is not None:
            gate_up_bias = interleaved(weights.gate_bias, weights.up_bias)
        qkv, outward, gate_up, down = self._weights(
            self.weights_dtype,
            (weights.qkv, weights.qkv_bias),
            (output, weights.output_bias),
            (interleaved(weights.gate, weights.up), gate_up_bias),
            (weights.down, weights.down_bias),
        )
        return Layer(
            input_norm=self._keep(weights.input_norm, shape.hidden),
            qkv=qkv,
            q_norm=self._keep(weights.q_norm, shape.head_dim),
            k_norm=self._keep(weights.k_norm, shape.head_dim),
            output=outward,
            post_attention_norm=self._keep(weights.post_attention_norm, shape.hidden),
            mlp_norm=self._keep(weights.mlp_norm, shape.hidden),
            gate_up=gate_up,
            down=down,
            post_mlp_norm=self._keep(weights.post_mlp_norm, shape.hidden),
            cosines=self._table(turned[0], shape),
            sines=self._table(turned[1], shape),
            window=layer.window,
            pages=pages.data_ptr(),
        )

    def _table(self, table: torch.Tensor | None, shape: DecoderShape) -> int | None:
        return None if table is None else self._keep(table, len(table), shape.rotary_dim // 2)

    def _weights(self, dtype: torch.dtype, *given: tuple[torch.Tensor, torch.Tensor | None]) -> list[Weight]:
        """Matrices, with their biases, packed one after the other."""
        made = []
        shapes = [packed_shape(matrix, dtype) for matrix, _ in given]
        for (matrix, bias), out in zip(given, memory.together(shapes, dtype), strict=True):
            outputs, inputs = matrix.shape
            weight = Weight(inputs=padded(inputs, STEP[dtype]), outputs=outputs)
            if dtype == torch.int8:
                matrix, scales = quantized(matrix)
                weight.scales = self._numbers(scales)
                weight.corrections = self._numbers(matrix.sum(dim=1, dtype=torch.int32) * -128)
            pack(matrix, out)
            self._kept.append(out)
            weight.packed = out.data_ptr()
            weight.bias = None if bias is None else self._numbers(bias)
            made.append(weight)
        return made

    def _numbers(self, given: torch.Tensor) -> int:
        """One for each output, and zeros for those that a matrix is padded with."""
        kept = F.pad(given, (0, padded(len(given), UNIT) - len(given))).contiguous()
        self._kept.append(kept)
        return kept.data_ptr()

    def _keep(self, tensor: torch.Tensor | None, *shape: int) -> int | None:
        """Of numbers in float32."""
        if tensor is None:
            return None
        kept = tensor.contiguous()
        self._kept.append(kept)
        return address(kept, torch.float32, *shape)
