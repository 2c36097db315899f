"""A decoder's weights, read from safetensors: every tensor of the files is used, known to be needless, or refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from worker.model.errors import ModelDamaged
from worker.model.library import checked

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from worker.model.decoder.config import DecoderShape

_STORED = frozenset({"F32", "F16", "BF16"})

_NEEDLESS = "rotary_emb.inv_freq"
"""In the names of tensors that old files have and that are computed."""

_EMBEDDING = "embed_tokens.weight"
_NORM = "norm.weight"
_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. Matrices are contiguous and in the model's dtype; norms (with the offset added) and biases are
    float32, rounded to the model's dtype before, as the library would hold them."""

    input_norm: torch.Tensor
    """``[hidden]``"""
    qkv: torch.Tensor
    """``[(heads + 2 * kv_heads) * head_dim, hidden]``: all heads of queries, then of keys, then of values."""
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    """``[head_dim]``"""
    k_norm: torch.Tensor | None
    output: torch.Tensor
    """``[hidden, heads * head_dim]``"""
    output_bias: torch.Tensor | None
    post_attention_norm: torch.Tensor | None
    """Of what attention gives, before it is added."""
    mlp_norm: torch.Tensor
    """Before the MLP."""
    gate: torch.Tensor
    """``[intermediate, hidden]``"""
    gate_bias: torch.Tensor | None
    up: torch.Tensor
    up_bias: torch.Tensor | None
    down: torch.Tensor
    """``[hidden, intermediate]``"""
    down_bias: torch.Tensor | None
    post_mlp_norm: torch.Tensor | None
    """Of what the MLP gives, before it is added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """A whole model."""

    embedding: torch.Tensor
    """``[vocab, hidden]``, not scaled."""
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    """``[hidden]`` float32, offset added."""
    head: torch.Tensor
    """``[vocab, hidden]``; the very same tensor as ``embedding`` where they are tied."""


def read(directory: Path, shape: DecoderShape, dtype: torch.dtype) -> DecoderWeights:
    """Reads a model. Matrices that are stored in ``dtype`` may stay mapped from the files.

    Args:
        directory: with ``model.safetensors``, or an index of several files.
        dtype: what matrices become.

    Raises:
        ModelDamaged: files that can't be read; tensors missing, unexpected or of another shape or kind.
    """
    try:
        stored = _Stored(directory)
        _account(stored, shape)
        return _Reader(stored, shape, dtype).decoder()
    except (OSError, SafetensorError) as error:
        raise ModelDamaged(f"the weights in {directory} can't be read: {error!r}") from error


class _Stored:
    """The tensors of a directory, by name, none read yet."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, Any] = {}
        for path in _paths(directory):
            opened: Any = safe_open(path, framework="pt")
            self._files.update(dict.fromkeys(opened.keys(), opened))
        # The library takes a file that was saved without the head, too.
        self.prefix = "model." if any(name.startswith("model.") for name in self._files) else ""

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def look(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and kind of number."""
        found = self._files[name].get_slice(name)
        return tuple(found.get_shape()), found.get_dtype()

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor


def _paths(directory: Path) -> list[Path]:
    """The files that the library would take, where a directory has others as well."""
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        raise ModelDamaged(f"{directory} has neither {single.name} nor {index.name}")
    try:
        return [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelDamaged(f"{index} can't be read: {error!r}") from error


def _account(stored: _Stored, shape: DecoderShape) -> None:
    """Raises `ModelDamaged` unless the files have just the tensors that a shape asks for."""
    wanted = {stored.prefix + name: size for name, size in _tensors(shape).items()}
    embedding = stored.prefix + _EMBEDDING
    wanted[_HEAD] = wanted[embedding]
    if shape.tied and (embedding in stored or _HEAD in stored):  # one is enough
        wanted = {name: size for name, size in wanted.items() if name not in (embedding, _HEAD) or name in stored}
    found = {name: stored.look(name) for name in stored if _NEEDLESS not in name}
    both = wanted.keys() & found.keys()
    report = {
        "missing_keys": wanted.keys() - found.keys(),
        "unexpected_keys": found.keys() - wanted.keys(),
        "mismatched_keys": {f"{name} {list(found[name][0])}" for name in both if found[name][0] != wanted[name]},
        "unreadable_keys": {f"{name} {found[name][1]}" for name in both if found[name][1] not in _STORED},
    }
    checked(report, stored.directory)


def _tensors(shape: DecoderShape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all but the head, in files that have one."""
    named: dict[str, tuple[int, ...]] = {_EMBEDDING: (shape.vocab, shape.hidden), _NORM: (shape.hidden,)}
    for index in range(len(shape.layers)):
        named |= {f"layers.{index}.{name}": size for name, size in _layer_tensors(shape).items()}
    return named


def _layer_tensors(shape: DecoderShape) -> dict[str, tuple[int, ...]]:
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if shape.sandwich else []
    named: dict[str, tuple[int, ...]] = {f"{name}.weight": (shape.hidden,) for name in norms}
    if shape.qk_norm:
        named |= {f"self_attn.{name}.weight": (shape.head_dim,) for name in ("q_norm", "k_norm")}
    if _is_joined(shape):
        inputs = {"self_attn.qkv_proj": query + 2 * key, "mlp.gate_up_proj": 2 * shape.intermediate}
    else:
        inputs = {f"self_attn.{part}_proj": rows for part, rows in (("q", query), ("k", key), ("v", key))}
        inputs |= {f"mlp.{part}_proj": shape.intermediate for part in ("gate", "up")}
    sizes = {name: (rows, shape.hidden) for name, rows in inputs.items()}
    sizes["self_attn.o_proj"] = (shape.hidden, query)
    sizes["mlp.down_proj"] = (shape.hidden, shape.intermediate)
    for name, size in sizes.items():
        named[f"{name}.weight"] = size
        if _is_biased(shape, name):
            named[f"{name}.bias"] = size[:1]
    return named


def _is_joined(shape: DecoderShape) -> bool:
    """Queries, keys and values are one matrix in the files, gate and up another."""
    return shape.family == "phi3"


def _is_biased(shape: DecoderShape, name: str) -> bool:
    if name.startswith("mlp"):
        return shape.mlp_bias
    return shape.output_bias if name.endswith("o_proj") else shape.qkv_bias


class _Reader:
    """Puts tensors that are known to be there into their places."""

    def __init__(self, stored: _Stored, shape: DecoderShape, dtype: torch.dtype) -> None:
        self._stored = stored
        self._shape = shape
        self._dtype = dtype

    def decoder(self) -> DecoderWeights:
        embedding, head = self._ends()
        return DecoderWeights(
            embedding=embedding,
            layers=tuple(self._layer(f"layers.{index}.") for index in range(len(self._shape.layers))),
            final_norm=self._norm(_NORM),
            head=head,
        )

    def _ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Embedding and head. The library, too, does not tie two that are both stored and differ."""
        name = self._stored.prefix + _EMBEDDING
        embedding, head = (
            self._stored.read(stored).to(self._dtype).contiguous() if stored in self._stored else None
            for stored in (name, _HEAD)
        )
        if embedding is None or head is None:
            only = head if embedding is None else embedding
            assert only is not None
            return only, only
        return embedding, embedding if self._shape.tied and torch.equal(embedding, head) else head

    def _layer(self, at: str) -> LayerWeights:
        shape = self._shape
        attention, mlp = f"{at}self_attn.", f"{at}mlp."
        if _is_joined(shape):
            qkv = self._matrix(f"{attention}qkv_proj")
            gate, up = self._matrix(f"{mlp}gate_up_proj").chunk(2)  # rows: both parts are contiguous
        else:
            qkv = torch.cat([self._matrix(f"{attention}{part}_proj") for part in "qkv"])
            gate, up = self._matrix(f"{mlp}gate_proj"), self._matrix(f"{mlp}up_proj")
        biases = [self._bias(f"{attention}{part}_proj") for part in "qkv"]
        after_attention = f"{at}post_attention_layernorm.weight"
        return LayerWeights(
            input_norm=self._norm(f"{at}input_layernorm.weight"),
            qkv=qkv,
            qkv_bias=torch.cat([bias for bias in biases if bias is not None]) if shape.qkv_bias else None,
            q_norm=self._norm(f"{attention}q_norm.weight") if shape.qk_norm else None,
            k_norm=self._norm(f"{attention}k_norm.weight") if shape.qk_norm else None,
            output=self._matrix(f"{attention}o_proj"),
            output_bias=self._bias(f"{attention}o_proj"),
            post_attention_norm=self._norm(after_attention) if shape.sandwich else None,
            mlp_norm=self._norm(f"{at}pre_feedforward_layernorm.weight" if shape.sandwich else after_attention),
            gate=gate,
            gate_bias=self._bias(f"{mlp}gate_proj"),
            up=up,
            up_bias=self._bias(f"{mlp}up_proj"),
            down=self._matrix(f"{mlp}down_proj"),
            down_bias=self._bias(f"{mlp}down_proj"),
            post_mlp_norm=self._norm(f"{at}post_feedforward_layernorm.weight") if shape.sandwich else None,
        )

    def _read(self, name: str) -> torch.Tensor:
        return self._stored.read(self._stored.prefix + name).to(self._dtype)

    def _matrix(self, name: str) -> torch.Tensor:
        return self._read(f"{name}.weight").contiguous()

    def _bias(self, name: str) -> torch.Tensor | None:
        """None where the shape has none: then the files have none, either."""
        biased = self._stored.prefix + f"{name}.bias" in self._stored
        return self._read(f"{name}.bias").to(torch.float32, copy=True) if biased else None

    def _norm(self, name: str) -> torch.Tensor:
        return self._read(name).to(torch.float32) + self._shape.norm_offset
