"""From a model's own configuration to what a decoder must compute: exactly that, or a refusal that says why not.

All families here are one decoder: an embedding, layers of grouped attention and a gated MLP with RMS norms before (and
perhaps after) each, a last norm and a head. What differs between them is in `DecoderShape`. What a configuration can
ask for and is not there is refused as `NotFused`, so that the model runs in another way. The measure is what the
library's own model computes, settings that it ignores included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

_ROPE_TYPES = frozenset({"default", "linear", "dynamic", "yarn", "longrope", "llama3"})

MOST_HEAD = 1024
"""As in ``pages.h``: numbers of a head."""

_SLIDING = "sliding_attention"
_FULL = "full_attention"


class NotFused(Exception):  # noqa: N818 - reads as a fact, and is none of a model's errors: it can run in another way
    """The decoder can't compute exactly what a configuration asks for. The message has the setting and its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What may differ from layer to layer."""

    window: int
    """Keys that a token sees, itself included; 0: all up to itself."""
    rope: int
    """Which of ``DecoderShape.ropes`` rotates queries and keys; -1: none does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """All that decides what is computed, but for the weights."""

    family: str
    """The configuration's ``model_type``."""
    vocab: int
    hidden: int
    heads: int
    kv_heads: int
    """Divides ``heads``: that many neighbouring heads share one."""
    head_dim: int
    intermediate: int
    norm_eps: float
    norm_offset: float
    """1.0 where norms multiply by 1 + weight, else 0.0."""
    activation: str
    """Of the gate: ``silu`` or ``gelu_tanh``."""
    embed_scale: float
    """What embeddings are multiplied by, already rounded to the model's dtype."""
    attention_scale: float
    """What products of queries and keys are multiplied by."""
    attention_softcap: float
    """Scores become cap * tanh(score / cap); 0: they don't."""
    logit_softcap: float
    """The same for logits."""
    qk_norm: bool
    """Each head of queries and keys has an RMS norm, before the rotation."""
    sandwich: bool
    """What attention and MLP give is normed too, before it is added."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    """Of gate, up and down."""
    rotary_dim: int
    """So many numbers at the front of each head are rotated, number i with number i + rotary_dim / 2."""
    ropes: tuple[str, ...]
    """The kinds of rotation, by their names in ``rope_parameters``; "" for the only one."""
    layers: tuple[LayerShape, ...]
    tied: bool
    """The head is the embedding, unless the files have a different one: `DecoderWeights.head` has what is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What the library's model of a family does with its configuration."""

    gemma: bool = False
    qk_norm: bool = False
    biased_qkv: bool = False
    """Always, whatever the configuration says."""
    attention_bias: bool = False
    """Reads the setting of that name."""
    mlp_bias: bool = False
    layer_types: bool = False
    """Windows by ``layer_types``; without, ``window`` decides for all."""
    window: bool = False
    partial: bool = False
    """Rotates only a part of each head, where asked to."""
    ropes_by_type: bool = False


_FAMILIES = {
    "llama": _Family(attention_bias=True, mlp_bias=True),
    "mistral": _Family(window=True),
    "smollm3": _Family(attention_bias=True, mlp_bias=True, layer_types=True),
    "qwen2": _Family(biased_qkv=True, layer_types=True),
    "qwen3": _Family(qk_norm=True, attention_bias=True, layer_types=True),
    "gemma2": _Family(gemma=True, attention_bias=True, layer_types=True),
    "gemma3_text": _Family(gemma=True, qk_norm=True, attention_bias=True, layer_types=True, ropes_by_type=True),
    "phi3": _Family(window=True, partial=True),
}


def shape_of(config: PreTrainedConfig, dtype: torch.dtype) -> DecoderShape:
    """Describes a model.

    Args:
        config: as ``AutoConfig`` gives it for the model's directory: not the part for text of a larger model, whose
            tensors have other names.
        dtype: what the model runs in.

    Raises:
        NotFused: it asks for something that can't be described.
    """
    family = _FAMILIES.get(config.model_type)
    if family is None:
        raise NotFused(f"model_type {config.model_type!r} is none of {', '.join(sorted(_FAMILIES))}")
    _refuse_switches(config, family)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if config.num_attention_heads % config.num_key_value_heads:
        raise NotFused(f"num_key_value_heads {config.num_key_value_heads} does not divide num_attention_heads")
    if head_dim > MOST_HEAD:
        raise NotFused(f"head_dim {head_dim}: {MOST_HEAD} at most")
    ropes = tuple(sorted(set(config.layer_types))) if family.ropes_by_type else ("",)
    attention_bias = family.attention_bias and bool(config.attention_bias)
    scaled_by = config.query_pre_attn_scalar if family.gemma else head_dim
    embed_scale = float(torch.tensor(config.hidden_size**0.5, dtype=dtype)) if family.gemma else 1.0
    return DecoderShape(
        family=config.model_type,
        vocab=config.vocab_size,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        intermediate=config.intermediate_size,
        norm_eps=float(config.rms_norm_eps),
        norm_offset=1.0 if family.gemma else 0.0,
        activation=_activation(config, "hidden_activation" if family.gemma else "hidden_act"),
        embed_scale=embed_scale,
        attention_scale=float(scaled_by**-0.5),
        attention_softcap=_softcap(config, "attn_logit_softcapping") if family.gemma else 0.0,
        logit_softcap=_softcap(config, "final_logit_softcapping") if family.gemma else 0.0,
        qk_norm=family.qk_norm,
        sandwich=family.gemma,
        qkv_bias=family.biased_qkv or attention_bias,
        output_bias=attention_bias,
        mlp_bias=family.mlp_bias and bool(config.mlp_bias),
        rotary_dim=_rotary_dim(config, family, head_dim, ropes),
        ropes=ropes,
        layers=_layers(config, family, ropes),
        tied=bool(config.tie_word_embeddings),
    )


def rotary_tables(
    config: PreTrainedConfig, shape: DecoderShape, context_length: int
) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """Cosines and sines for each of ``shape.ropes``: float32 ``[context_length, rotary_dim // 2]``, attention factor
    included. They have the bits of the library's own for a text of that length in float32.

    Raises:
        NotFused: so long a text would have frequencies that depend on how long the longest text in its batch is.
    """
    return tuple(_rotary_table(config, shape, name, context_length) for name in shape.ropes)


def _rotary_table(
    config: PreTrainedConfig, shape: DecoderShape, name: str, context_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    parameters = _rope_parameters(config, name)
    kind = parameters["rope_type"]
    constant = {
        "dynamic": config.max_position_embeddings,
        "longrope": parameters.get("original_max_position_embeddings"),
    }.get(kind, context_length)
    if context_length > constant:
        raise NotFused(f"rope_type {kind!r} has no constant frequencies for {context_length} positions, {constant} has")
    if kind == "default":
        steps = torch.arange(0, shape.rotary_dim, 2, dtype=torch.float) / shape.rotary_dim
        frequencies, factor = 1.0 / (parameters["rope_theta"] ** steps), 1.0
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, layer_type=name or None)
    angles = torch.arange(context_length)[:, None].float() * frequencies
    # Twice side by side, as the library has them: a vectorised cosine might treat the ends of rows in its own way.
    angles = torch.cat((angles, angles), dim=-1)
    half = shape.rotary_dim // 2
    cos, sin = (angles.cos() * factor)[:, :half], (angles.sin() * factor)[:, :half]
    return cos.contiguous(), sin.contiguous()


def _refuse_switches(config: PreTrainedConfig, family: _Family) -> None:
    """Settings that any of these models would follow, and the decoder would not."""
    if getattr(config, "is_heterogeneous", False):
        raise NotFused("per_layer_config: layers of different sizes")
    if getattr(config, "use_bidirectional_attention", None):
        raise NotFused(f"use_bidirectional_attention {config.use_bidirectional_attention!r}: attention is causal here")
    if not getattr(config, "is_causal", True):
        raise NotFused(f"is_causal {config.is_causal!r}: attention is causal here")
    for name in ("quantization_config", "transformers_weights"):
        if getattr(config, name, None):
            raise NotFused(f"{name} {getattr(config, name)!r}: weights are read as they are, from the usual files")
    if not family.layer_types and getattr(config, "layer_types", None):
        raise NotFused(f"layer_types {config.layer_types!r}: not for model_type {config.model_type!r}")
    if config.model_type == "gemma3_text" and config.attn_logit_softcapping is not None:
        raise NotFused(f"attn_logit_softcapping {config.attn_logit_softcapping!r}: the library's model ignores it")


def _activation(config: PreTrainedConfig, name: str) -> str:
    value = getattr(config, name)
    if value not in _ACTIVATIONS:
        raise NotFused(f"{name} {value!r} is none of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[value]


def _softcap(config: PreTrainedConfig, name: str) -> float:
    value = getattr(config, name)
    if value is not None and not value > 0:
        raise NotFused(f"{name} {value!r} is not above 0")
    return float(value or 0.0)


def _rope_parameters(config: PreTrainedConfig, name: str) -> dict[str, Any]:
    parameters: Any = config.rope_parameters
    field = "rope_parameters"
    if name:
        parameters, field = parameters.get(name), f"{field}.{name}"
    if not isinstance(parameters, dict) or any(isinstance(value, dict) for value in parameters.values()):
        raise NotFused(f"{field} {parameters!r} does not describe one rotation")
    if parameters.get("rope_type") not in _ROPE_TYPES:
        raise NotFused(f"{field}.rope_type {parameters.get('rope_type')!r} is none of {', '.join(sorted(_ROPE_TYPES))}")
    return parameters


def _rotary_dim(config: PreTrainedConfig, family: _Family, head_dim: int, ropes: tuple[str, ...]) -> int:
    dim = head_dim
    for name in ropes:
        part = _rope_parameters(config, name).get("partial_rotary_factor")
        if part not in (None, 1, 1.0):
            if not family.partial:
                raise NotFused(f"partial_rotary_factor {part!r}: not for model_type {config.model_type!r}")
            dim = int(head_dim * part)
    if dim % 2 or not 0 < dim <= head_dim:
        raise NotFused(f"{dim} numbers to rotate in a head of {head_dim}: not an even part of it")
    return dim


def _layers(config: PreTrainedConfig, family: _Family, ropes: tuple[str, ...]) -> tuple[LayerShape, ...]:
    count = config.num_hidden_layers
    types: list[str] = [_SLIDING if family.window and config.sliding_window is not None else _FULL] * count
    if family.layer_types:
        types = config.layer_types
    odd = sorted(set(types) - {_SLIDING, _FULL})
    if odd or len(types) != count:
        raise NotFused(f"layer_types {types!r}: not {count} of {_FULL} and {_SLIDING}")
    window = config.sliding_window if _SLIDING in types else 0
    if _SLIDING in types and (not window or window < 1 or not getattr(config, "use_sliding_window", True)):
        raise NotFused(f"sliding_window {window!r}: layers are to have one, and use_sliding_window must allow it")
    rotated = getattr(config, "no_rope_layers", None) or [1] * count
    if len(rotated) < count:
        raise NotFused(f"no_rope_layers {rotated!r}: {count} layers")
    return tuple(
        LayerShape(
            window=window if kind == _SLIDING else 0,
            rope=-1 if not rotated[index] else ropes.index(kind) if family.ropes_by_type else 0,
        )
        for index, kind in enumerate(types)
    )
