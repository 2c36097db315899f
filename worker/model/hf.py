"""Any decoder-only transformers model, run on paged K/V through the library's attention interface.

On the CPU a token's logits have the same bits on every path: alone or in a batch, in one chunk or many, decoded or
prefilled, after a prefix of its own or another's. Products and activations see to that (`worker.model.swap`), and
attention whose shapes follow from the position (`worker.kernels.plan`). All else in these models treats each row alone,
which is checked. What this machine does not keep is measured at load and reported. It holds for the number of threads
that was set at load, so a runner sees to it that it gets these. On CUDA there is no such promise.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from worker.kernels import probe
from worker.kernels.attention import PagedAttention
from worker.kernels.plan import PoolShape, StepPlan
from worker.model import adapt
from worker.model.audit import Audit
from worker.model.errors import INT8_NEEDS_FUSED, ModelDamaged, ModelUnsupported
from worker.model.library import checked, quiet
from worker.model.room import Memory, left, room
from worker.model.swap import RotaryTable, Swapped, swap, swap_rotary
from worker.step import NotFinite, StepRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from worker.model.loader import ModelFiles, Progress

log = logging.getLogger(__name__)

LAYOUT = "octavo-kv/2"
"""Changes whenever the bits of a page may differ from those of an older version for the same tokens."""

_CHECKED_TOKENS = 24
_CHECK_POOL = PoolShape(num_blocks=4, block_size=16)
"""Of its own, so that the fingerprint does not depend on the pool."""

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.08}
"""Relative difference to transformers' own attention that is still rounding."""


class HfRunner:
    """A model with its pages. Implements `worker.step.Runner`.

    Args:
        model: with its attention set to `adapt.PAGED`.
        attention: the pages, one set for each of its layers.
        vocab_size: how many of the logits are ids that may be sampled.
        fingerprint: see there.
        doubts: see there.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        attention: PagedAttention,
        *,
        vocab_size: int,
        fingerprint: str = "",
        doubts: tuple[str, ...] = (),
    ) -> None:
        self.model = model
        self.attention = attention
        self.vocab_size = vocab_size
        self.block_size = attention.pool.block_size
        self.num_blocks = attention.pool.num_blocks
        self.fingerprint = fingerprint
        """SHA-256 (hex) of all that decides the bits of a page: weights, configuration, dtype, device class, layout,
        and what this machine computes with its libraries and number of threads; and of the tokenizer's files. Not of
        the number or size of blocks."""
        self.doubts = doubts
        """Why a token's bits may depend on its neighbours. Empty: they do not."""
        self._threads = torch.get_num_threads()

    @torch.inference_mode()
    def forward(self, rows: Sequence[StepRow]) -> torch.Tensor:
        """Runs one step; returns float32 logits ``[sum of the rows' logits, vocab_size]``, in order.

        The logits of a row that left anything in its pages that is not finite are all NaN.

        Raises:
            NotFinite: so did a row that asked for no logits. Nothing of this step may be used by others.
        """
        # Asking also makes it so in a thread of Python's that is new: libraries would take what the environment says.
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        plan = self.attention.plan(rows)
        self.attention.begin(plan)
        output = self.model(
            input_ids=plan.token_ids,
            position_ids=plan.positions,
            use_cache=False,
            logits_to_keep=plan.logit_rows,
            octavo_step=_BoundStep(self.attention, plan),
        )
        logits: torch.Tensor = output.logits[0, : plan.logit_count, : self.vocab_size].float()
        for damaged in self.attention.damaged(plan):
            wanted = rows[damaged].logits
            if not wanted:
                raise NotFinite("the keys or values of a chunk are not finite")
            first = sum(row.logits for row in rows[:damaged])
            logits[first : first + wanted] = torch.nan
        return logits

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks of all layers, ``(from, to)`` each."""
        self.attention.copy_blocks(pairs)

    @property
    def page_bytes(self) -> int:
        """Of a block, in all layers."""
        return self.attention.page_bytes

    @property
    def page_layout(self) -> str:
        """Of the pages of `PagedAttention`."""
        return f"{LAYOUT} {self.attention.dtype} {self.attention.device.type}"

    @torch.inference_mode()
    def read_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        """What these blocks hold."""
        return self.attention.read_blocks(blocks)

    @torch.inference_mode()
    def write_blocks(self, blocks: Sequence[int], payloads: Sequence[bytes | memoryview]) -> None:
        """Makes these blocks hold that. ValueError for a payload of another size than ``page_bytes``."""
        self.attention.write_blocks(blocks, payloads)


class _BoundStep:
    """A step's plan together with the pages: what the attention layers get."""

    def __init__(self, attention: PagedAttention, plan: StepPlan) -> None:
        self._attention = attention
        self._plan = plan

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return self._attention.attend(layer, self._plan, query, key, value)


def load(files: ModelFiles, *, num_blocks: int, block_size: int, progress: Progress) -> HfRunner:
    """Loads the weights and allocates ``num_blocks`` blocks of ``block_size`` positions.

    Raises:
        ModelDamaged: tensors missing, unexpected or of another shape.
        ModelUnsupported: a model that can't run on pages.
        NoRoom: for so many blocks.
        ValueError: a block size that is not a power of two.
    """
    if files.quantized:
        raise ModelUnsupported(INT8_NEEDS_FUSED)
    adapt.register()
    progress(f"reading {files.name} as {files.dtype_name}")
    model = _weights(files)
    config = model.config.get_text_config()
    torch.nn.Module.to(model, files.device)
    if files.device.type == "cpu" and any(parameter.ndim == 3 for parameter in model.parameters()):
        model.set_experts_implementation("eager")  # one by one, with products that can be made exact
    layers, width = adapt.inspect(model, config.num_hidden_layers, files.context_length)
    vocab_size = min(files.vocab_size, width)
    swapped = _made_exact(model, files, progress)
    block_bytes = sum(2 * each.kv_heads * block_size * each.head_size * files.dtype.itemsize for each in layers)
    with room(num_blocks, block_size, block_bytes, _memory(files.device)):
        attention = PagedAttention(layers, PoolShape(num_blocks, block_size), files.dtype, files.device, swapped.tiles)
    used = {f"{method.name} (tiles of {method.heads.narrow} and more)": method for method in attention.methods}
    progress(f"attention over pages: {', '.join(sorted(used))}; {num_blocks} blocks of {block_size}")
    if files.device.type == "cpu":
        swapped.digests.update({name: method.digest for name, method in used.items()})
        swapped.doubts += [f"attention, {name}" for name, method in used.items() if not method.exact]
    small = PagedAttention(layers, _CHECK_POOL, files.dtype, files.device, swapped.tiles)
    _check(HfRunner(model, small, vocab_size=vocab_size), files, swapped)
    for doubt in swapped.doubts:
        progress(f"a token's bits may depend on its neighbours: {doubt}")
    fingerprint = _fingerprint(files, model, swapped.digests)
    doubts = tuple(swapped.doubts)
    return HfRunner(model, attention, vocab_size=vocab_size, fingerprint=fingerprint, doubts=doubts)


def _memory(device: torch.device) -> Memory:
    """What pages may take of, which are written to at once."""
    if device.type != "cuda":
        return left()
    return Memory(torch.cuda.mem_get_info(device)[0], "the device has left")


def _made_exact(model: PreTrainedModel, files: ModelFiles, progress: Progress) -> Swapped:
    """What was swapped in the model, so that a token's bits do not depend on its neighbours."""
    if files.device.type != "cpu":
        swap_rotary(model, files.context_length)
        return Swapped(doubts=[f"{files.device.type} makes no promise"])
    swapped = swap(model, files.context_length, files.dtype)
    progress(swapped.summary)
    with Audit(model) as audit:
        adapt.look(model, files.context_length)
    swapped.doubts += [f"the model computes {name} by itself" for name in sorted(audit.found)]
    return swapped


def _weights(files: ModelFiles) -> PreTrainedModel:
    """The model as transformers makes it, in evaluation mode, every tensor accounted for."""
    try:
        config = AutoConfig.from_pretrained(files.directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelDamaged(f"{files.directory}/config.json: {error}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise ModelUnsupported(f"{config.model_type}: encoder-decoder models can't run on pages")
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ModelUnsupported(f"{config.model_type}: not a causal language model that transformers knows")
    try:
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                files.directory,
                config=config,
                dtype=files.dtype,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that the report has them
            )
    except ModuleNotFoundError:
        raise
    except Exception as error:
        raise ModelDamaged(f"the weights in {files.directory} can't be read: {error}") from error
    model: PreTrainedModel = loaded[0]
    checked(loaded[1], files.directory)
    model.requires_grad_(False)
    return model


def _check(runner: HfRunner, files: ModelFiles, swapped: Swapped) -> None:
    """Compares two short texts, run together on pages, with transformers' own attention on the same weights."""
    count = min(_CHECKED_TOKENS, files.context_length)
    if count < 2:
        return
    blocks = runner.num_blocks // 2
    texts = [[(seed + 7 * index) % runner.vocab_size for index in range(count)] for seed in (11, 4)]
    tables = [list(range(start, start + blocks)) for start in (0, blocks)]
    model = runner.model
    try:
        ours = runner.forward([StepRow(text, 0, table, count) for text, table in zip(texts, tables, strict=True)])
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelUnsupported(f"{model.config.model_type}: its forward pass does not fit pages: {error!r}") from error
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            output = model(input_ids=torch.tensor(texts, device=ours.device), use_cache=False)
    finally:
        model.set_attn_implementation(adapt.PAGED)
    theirs = output.logits[:, -1, : runner.vocab_size].float()
    difference = float((ours[count - 1 :: count] - theirs).norm() / theirs.norm())
    log.info("against transformers' own attention: relative difference %.1e", difference)
    if not difference < _TOLERANCE[files.dtype]:
        raise ModelUnsupported(
            f"{model.config.model_type}: attention over pages gives other logits than transformers' own "
            f"(relative difference {difference:.2g}); this kind of model can't be served"
        )
    if files.device.type == "cpu":
        tables_made = [module.digest() for module in model.modules() if isinstance(module, RotaryTable)]
        swapped.digests["rotary"] = " ".join(tables_made)
        swapped.digests["logits"] = probe.digest([ours])


def _device(device: torch.device) -> str | list[str]:
    """What else the bits depend on: a CPU's are probed at load, those of CUDA are its libraries' and chip's own."""
    if device.type == "cpu":
        return device.type
    chip = torch.cuda.get_device_properties(device)
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    versions = (torch.__version__, torch.version.cuda, cudnn)
    return [device.type, chip.name, f"{chip.major}.{chip.minor}", *map(str, versions)]


def _fingerprint(files: ModelFiles, model: PreTrainedModel, digests: dict[str, str]) -> str:
    config = model.config.to_diff_dict()
    for name in ("_name_or_path", "transformers_version", "architectures", "dtype", "use_cache"):
        config.pop(name, None)
    parts: dict[str, Any] = {
        "layout": LAYOUT,
        "weights": files.digest,
        "config": config,
        "dtype": files.dtype_name,
        "device": _device(files.device),
        "computed": digests,
        "tokenizer": hashlib.sha256(files.tokenizer_json).hexdigest(),
        "tokenizer_config": hashlib.sha256(files.tokenizer_config).hexdigest(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
