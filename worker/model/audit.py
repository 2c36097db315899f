"""Which operations of a model's forward pass may give a token bits that depend on its neighbours.

Known to be safe: operations that only move numbers; those of single numbers that are exact, or computed by the same
routine wherever a number is; and reductions along a row, which torch cuts up by the row's length alone. Products and
other functions of single numbers are safe in the modules that were swapped in for them, and nowhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from worker.kernels.elementwise import RowExactActivation
from worker.kernels.linear import RowExactLinear, RowExactWeight
from worker.model.swap import RotaryTable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MOVES = _names("""
    alias arange cat chunk clone contiguous copy copy_ detach detach_ diff dropout embedding empty empty_like expand
    flatten full full_like gather index index_add index_add_ index_copy_ index_put_ index_select item lift_fresh
    _local_scalar_dense masked_fill masked_fill_ new_empty new_full new_ones new_zeros nonzero numpy_T one_hot ones
    ones_like permute repeat repeat_interleave reshape roll select slice sort split split_with_sizes squeeze stack t
    to _to_copy topk transpose type_as unbind unflatten unsqueeze view where zeros zeros_like
""")
_EXACT = _names("""
    abs add add_ all __and__ any bitwise_and bitwise_not bitwise_or clamp clamp_max clamp_min cos div div_ eq equal exp
    floor_divide ge greater gt is_nonzero isin le log logical_and logical_not logical_or lt maximum minimum mul mul_ ne
    neg __or__ pow reciprocal relu remainder rsqrt rsub sign sin sqrt square sub sub_ tanh
""")
_ALONG_ROWS = _names("amax amin argmax cumsum layer_norm log_softmax max mean min norm prod rms_norm softmax sum")

SAFE = _MOVES | _EXACT | _ALONG_ROWS


class Audit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the names of doubtful operations while it is entered, as ``found``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()
        self._model = model
        self._inside = 0
        self._hooks: list[Any] = []

    def __enter__(self) -> Audit:
        for module in _swapped_in(self._model):
            self._hooks.append(module.register_forward_pre_hook(self._enter_module))
            self._hooks.append(module.register_forward_hook(self._leave_module, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def _enter_module(self, *_: Any) -> None:
        self._inside += 1

    def _leave_module(self, *_: Any) -> None:
        self._inside -= 1

    def __torch_dispatch__(
        self, function: Any, types: Any, given: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        options = options or {}
        name = function.overloadpacket.__name__
        if not self._inside and (name not in SAFE or _is_rounded(name, given, options)):
            self.found.add(name)
        return function(*given, **options)


def _swapped_in(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if isinstance(module, RowExactLinear | RowExactActivation | RotaryTable):
            yield module
        for value in vars(module).values():
            if isinstance(value, RowExactWeight):
                yield from value.layers


def _is_rounded(name: str, given: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether an operation that is usually exact is not, as it is called here."""
    if name in {"add", "add_", "sub", "sub_", "rsub"}:
        return bool(options.get("alpha", 1) != 1)
    if name == "pow":
        return given[1] not in {1, 2, 3, 0.5, -1} if isinstance(given[1], int | float) else True
    return name == "rsqrt" and bool(given[0].dtype not in {torch.float32, torch.float64})
