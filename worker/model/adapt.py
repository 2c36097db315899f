"""Fits a transformers model to pages: routes its attention to us, and swaps what would depend on a row's neighbours.

The library calls a registered function in every attention layer. One registered name serves a step; another only looks:
it notes what each layer is like and refuses what the pages can't give it. Nothing is assumed from a model's name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.pytorch_utils import Conv1D

from worker.kernels.cores import LayerSpec
from worker.kernels.linear import RowExactLinear
from worker.model.errors import ModelUnsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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


def swap_products(model: nn.Module, progress: Callable[[str], None]) -> str:
    """Replaces every linear layer by a row-exact one; returns their kind, ``packed`` or ``plain``."""
    tiles: dict[tuple[int, ...], tuple[int, ...]] = {}
    kind = "plain"
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            weight = module.weight
        elif type(module) is Conv1D:
            weight = module.weight.T.contiguous()
        else:
            continue
        shape = tuple(weight.shape)
        exact = RowExactLinear(weight, module.bias, tiles.get(shape))
        if shape not in tiles:
            tiles[shape] = exact.tiles
        if exact.packed:
            kind = "packed"
        model.set_submodule(name, exact)
    kept = ", ".join(f"{shape[1]}>{shape[0]}: {'/'.join(map(str, sizes))}" for shape, sizes in tiles.items())
    progress(f"row-exact products ({kind}), tiles of rows per shape: {kept}")
    if any(parameter.ndim == 3 for parameter in model.parameters()):
        progress("mixtures of experts multiply in batches of their own: their bits may depend on other rows")
    return kind


def swap_rotary(model: nn.Module, context_length: int) -> None:
    """Replaces rotary embeddings by tables of what they give for each position."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RotaryEmbedding") and not isinstance(module, RotaryTable):
            model.set_submodule(name, RotaryTable(module, context_length))


class RotaryTable(nn.Module):
    """Cosines and sines by position, computed once: faster, and vectorised remainders can't change a bit.

    Args:
        source: a module called with ``(x, position_ids, ...)`` that returns ``(cos, sin)``.
        positions: how many positions there are.
    """

    def __init__(self, source: nn.Module, positions: int) -> None:
        super().__init__()
        self.source = source
        self.positions = positions
        self._tables: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As ``source``; ``position_ids`` is ``[1, tokens]``."""
        key = (x.dtype, args, tuple(sorted(kwargs.items())))
        if key not in self._tables:
            self._tables[key] = self._table(x, position_ids.device, *args, **kwargs)
        cos, sin = self._tables[key]
        return F.embedding(position_ids, cos), F.embedding(position_ids, sin)

    def _table(
        self, x: torch.Tensor, device: torch.device, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        everything = torch.arange(self.positions, device=device)[None]
        given = self.source(x, everything, *args, **kwargs)
        if not isinstance(given, tuple) or len(given) != 2 or given[0].shape[:2] != everything.shape:
            raise ModelUnsupported(f"{type(self.source).__name__}: rotary embeddings other than (cos, sin) by position")
        cos, sin = given
        return cos[0].contiguous(), sin[0].contiguous()


def inspect(model: PreTrainedModel, layers: int, context_length: int) -> tuple[tuple[LayerSpec, ...], int]:
    """What each attention layer is like, in order, and the width of the logits.

    Raises:
        ModelUnsupported: something that attention over pages would silently get wrong.
    """
    inspector = _Inspector(model.config.model_type, context_length)
    model.set_attn_implementation(INSPECTED)
    device = next(model.parameters()).device
    tokens = torch.zeros(1, _INSPECTED_TOKENS, dtype=torch.int64, device=device)
    positions = torch.arange(_INSPECTED_TOKENS, device=device)[None]
    try:
        with torch.inference_mode():
            output = model(input_ids=tokens, position_ids=positions, use_cache=False, octavo_step=inspector)
    except ModelUnsupported:
        raise
    except Exception as error:
        raise ModelUnsupported(f"{model.config.model_type}: its forward pass does not fit pages: {error!r}") from error
    found = inspector.specs
    if sorted(found) != list(range(layers)):
        raise ModelUnsupported(
            f"{model.config.model_type}: {len(found)} of {layers} layers attend through the attention interface; "
            "recurrent, hybrid and cross-attending models can't run on pages"
        )
    model.set_attn_implementation(PAGED)
    return tuple(found[layer] for layer in range(layers)), output.logits.shape[-1]


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
