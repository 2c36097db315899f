"""Swaps the modules of a transformers model whose results for a token would depend on its neighbours.

Products, activations and rotary embeddings; everything else that is computed in these models treats each token alone,
which is checked: after the swaps, every operation of a forward pass outside of what was swapped in must be known to be
of that kind. What is not, and every measurement that failed, is a doubt: the worker serves, but says that it promises
nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from transformers.activations import ACT2CLS
from transformers.pytorch_utils import Conv1D

from worker.kernels import elementwise, probe
from worker.kernels.elementwise import RowExactActivation
from worker.kernels.linear import RowExactLinear, RowExactWeight
from worker.kernels.products import TILES
from worker.model.errors import ModelUnsupported

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ACTIVATIONS = frozenset(kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()) | {
    *(nn.ELU, nn.GELU, nn.Hardswish, nn.LeakyReLU, nn.Mish, nn.ReLU, nn.Sigmoid, nn.SiLU, nn.Softplus, nn.Tanh)
}
"""Classes of modules that are functions of single numbers."""


@dataclass(slots=True)
class Swapped:
    """What was swapped, and what it came to."""

    digests: dict[str, str] = field(default_factory=dict)
    """Of measured results, by what was measured: with the weights, they tell which bits a model computes here."""
    doubts: list[str] = field(default_factory=list)
    """Why a token's bits may depend on its neighbours. Empty: they don't."""
    tiles: tuple[int, ...] = TILES
    """Numbers of rows that all products can run as one tile, largest first. A multiple of the last one suits all."""
    summary: str = ""
    """For the log."""


def swap(model: PreTrainedModel, context_length: int, dtype: torch.dtype) -> Swapped:
    """Swaps everything in a model on the CPU, under the number of threads that it will run with."""
    swapped = Swapped()
    swap_rotary(model, context_length)
    _swap_activations(model, dtype, swapped)
    _swap_products(model, swapped)
    return swapped


def swap_rotary(model: nn.Module, context_length: int) -> None:
    """Replaces rotary embeddings by tables of what they give for each position."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RotaryEmbedding") and not isinstance(module, RotaryTable):
            model.set_submodule(name, RotaryTable(module, context_length))


def _swap_activations(model: nn.Module, dtype: torch.dtype, swapped: Swapped) -> None:
    for name, module in list(model.named_modules()):
        if type(module) in ACTIVATIONS and not list(module.parameters()):
            kind = repr(module)
            exact = RowExactActivation(module)
            if kind not in swapped.digests:
                found = elementwise.measure(exact, dtype)
                swapped.digests[kind] = found.digest
                swapped.doubts += [] if found.exact else [f"{kind}: a result's bits depend on its place"]
            model.set_submodule(name, exact)


def _swap_products(model: PreTrainedModel, swapped: Swapped) -> None:
    """Every linear layer; and weights that modules multiply by themselves: those of routers and experts."""
    layers: list[RowExactLinear] = []
    for name, module in list(model.named_modules()):
        if type(module) in (nn.Linear, Conv1D):
            weight = module.weight if type(module) is nn.Linear else module.weight.T.contiguous()
            layers.append(RowExactLinear(weight, module.bias))
            model.set_submodule(name, layers[-1])
        elif not isinstance(module, nn.Embedding):
            for key, parameter in list(module.named_parameters(recurse=False)):
                if parameter.ndim in (2, 3):
                    wrapped = RowExactWeight.wrap(parameter)
                    layers += wrapped.layers
                    del module._parameters[key]
                    setattr(module, key, wrapped)
    _note(layers, swapped)


def _note(layers: list[RowExactLinear], swapped: Swapped) -> None:
    shapes: dict[str, RowExactLinear] = {}
    for layer in layers:
        shapes.setdefault(f"{layer.in_features}>{layer.out_features} {layer.recipe.form}", layer)
    for name, layer in shapes.items():
        recipe = layer.recipe
        swapped.digests[name] = recipe.digest
        swapped.doubts += [] if recipe.exact else [f"products {name}: a row's bits depend on its place"]
    recipes = [layer.recipe for layer in shapes.values()]
    base = math.lcm(*(recipe.tiles[-1] for recipe in recipes))
    swapped.tiles = tuple(tile for tile in TILES if all(tile in recipe.tiles for recipe in recipes)) or (base,)
    cost = sum(layer.recipe.seconds for layer in layers) / sum(layer.recipe.plain_seconds for layer in layers)
    kept = ", ".join(f"{name} {'/'.join(map(str, layer.recipe.tiles))}" for name, layer in shapes.items())
    swapped.summary = f"row-exact products took {cost:.2f} times as long as plain ones; tiles of rows: {kept}"


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

    def digest(self) -> str:
        """Of all tables made so far."""
        return probe.digest(table for pair in self._tables.values() for table in pair)

    def _table(
        self, x: torch.Tensor, device: torch.device, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        everything = torch.arange(self.positions, device=device)[None]
        given = self.source(x, everything, *args, **kwargs)
        if not isinstance(given, tuple) or len(given) != 2 or given[0].shape[:2] != everything.shape:
            raise ModelUnsupported(f"{type(self.source).__name__}: rotary embeddings other than (cos, sin) by position")
        cos, sin = given
        return cos[0].contiguous(), sin[0].contiguous()
