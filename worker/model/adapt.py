"""Fits a transformers model to pages: routes its attention to us.

The library calls a registered function in every attention layer. One registered name serves a step; another only looks:
it notes what each layer is like and refuses what the pages can't give it. Nothing is assumed from a model's name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from worker.kernels.cores import LayerSpec
from worker.model.errors import ModelUnsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn
    from transformers import PreTrainedModel

PAGED = "octavo_paged"
INSPECTED = "octavo_inspected"

_INSPECTED_TOKENS = 16

_HARMLESS = frozenset(
    {"scaling", "sliding_window", "softcap", "dropout", "position_ids", "use_cache", "is_causal", "output_attentions"}
    | {"output_hidden_states", "return_dict", "logits_to_keep", "position_embeddings", "cache_position", "layer_type"}
)
"""Arguments of attention that are understood, or that change nothing here. Any other that is set is refused."""


class Step(Protocol):
    """What a model's attention layers need in a step. Travels to them as the keyword ``octavo_step``."""

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See `worker.kernels.attention.PagedAttention.attend`."""


def register() -> None:
    """Makes both names known to transformers. May be called again."""
    AttentionInterface.register(PAGED, _paged)
    AttentionInterface.register(INSPECTED, _inspected)
    AttentionMaskInterface.register(INSPECTED, _inspected_mask)


def inspect(model: PreTrainedModel, layers: int, context_length: int) -> tuple[tuple[LayerSpec, ...], int]:
    """What each attention layer is like, in order, and the width of the logits.

    Raises:
        ModelUnsupported: something that attention over pages would silently get wrong.
    """
    found, width = look(model, context_length)
    if sorted(found) != list(range(layers)):
        raise ModelUnsupported(
            f"{model.config.model_type}: {len(found)} of {layers} layers attend through the attention interface; "
            "recurrent, hybrid and cross-attending models can't run on pages"
        )
    return tuple(found[layer] for layer in range(layers)), width


def look(model: PreTrainedModel, context_length: int) -> tuple[dict[int, LayerSpec], int]:
    """A forward pass whose attention gives zeros: what each layer that attends is like, and the width of the logits."""
    inspector = _Inspector(model.config.model_type, context_length)
    model.set_attn_implementation(INSPECTED)
    device = model.get_input_embeddings().weight.device
    tokens = torch.zeros(1, _INSPECTED_TOKENS, dtype=torch.int64, device=device)
    positions = torch.arange(_INSPECTED_TOKENS, device=device)[None]
    try:
        with torch.inference_mode():
            output = model(input_ids=tokens, position_ids=positions, use_cache=False, octavo_step=inspector)
    except ModelUnsupported:
        raise
    except Exception as error:
        raise ModelUnsupported(f"{model.config.model_type}: its forward pass does not fit pages: {error!r}") from error
    model.set_attn_implementation(PAGED)
    return inspector.specs, output.logits.shape[-1]


class _Inspector:
    """Collects the layers of one forward pass, and refuses."""

    def __init__(self, model_type: str, context_length: int) -> None:
        self.model_type = model_type
        self.context_length = context_length
        self.specs: dict[int, LayerSpec] = {}

    def note(
        self,
        module: nn.Module,
        shapes: tuple[torch.Size, torch.Size, torch.Size],
        mask: torch.Tensor | None,
        options: Mapping[str, Any],
    ) -> None:
        query, key, value = shapes
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer in self.specs:
            raise self.refusal("attends more than once in a layer, or has layers without an index")
        given = {name for name, value in options.items() if value is not None and value is not False}
        odd = sorted(given - _HARMLESS)
        if odd:
            raise self.refusal(f"attention with {', '.join(odd)}")
        if not getattr(module, "is_causal", True):
            raise self.refusal("attention that is not causal")
        if key != value or query[1] % key[1] or query[3] != key[3] or query[2] != _INSPECTED_TOKENS:
            raise self.refusal(f"attention over shapes {tuple(query)}, {tuple(key)}, {tuple(value)}")
        window = int(options.get("sliding_window") or 0)
        window = 0 if window >= self.context_length else window
        if mask is None or self._mask_window(mask) != window:
            raise self.refusal(f"a mask unlike its sliding window of {window or 'no'} keys")
        scaling = options.get("scaling")
        self.specs[layer] = LayerSpec(
            heads=query[1],
            kv_heads=key[1],
            head_size=key[3],
            scaling=float(query[3] ** -0.5 if scaling is None else scaling),
            window=window,
            softcap=float(options.get("softcap") or 0.0),
        )

    def _mask_window(self, mask: torch.Tensor) -> int:
        """The window that `_inspected_mask` found; -1 where the mask was something else."""
        window = int(mask.reshape(-1)[0])
        return 0 if window >= self.context_length else window

    def refusal(self, why: str) -> ModelUnsupported:
        return ModelUnsupported(f"{self.model_type}: {why} is not supported")


def _paged(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    octavo_step: Step,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    layer: Any = module.layer_idx
    return octavo_step.attend(layer, query, key, value), None


def _inspected(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    octavo_step: _Inspector | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    if octavo_step is None:
        raise ModelUnsupported(f"{type(module).__name__}: a model that does not pass its arguments on to attention")
    octavo_step.note(module, (query.shape, key.shape, value.shape), attention_mask, options)
    return torch.zeros_like(query.transpose(1, 2), memory_format=torch.contiguous_format), None


def _inspected_mask(
    mask_function: Callable[..., torch.Tensor], local_size: int | None = None, **_: Any
) -> torch.Tensor:
    """Which window, if any, the mask that a layer would get is: as a tensor that reaches the layer in its place."""
    window = local_size or 0
    points = torch.tensor(sorted({0, 1, 2, 15, 16, 17, 40, *range(max(0, window - 2), window + 3), 2 * window + 7}))
    query, key = points[:, None], points[None, :]
    zero = torch.zeros((), dtype=torch.int64)
    given = mask_function(zero, zero, query, key).expand(len(points), len(points))
    expected = key <= query
    if window:
        expected = expected & (key > query - window)
    return torch.full((1, 1, 1, 1), window if torch.equal(given, expected) else -1)
