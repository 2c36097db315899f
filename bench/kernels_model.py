"""Models for measurements: which kernels, and decoders of any shape with weights that are made up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from worker.kernels.native.library import Native, NativeUnavailableError, best
from worker.model.decoder import runner as decoder
from worker.model.decoder.config import NotFused
from worker.model.decoder.native import NativeModel, padded
from worker.model.decoder.runner import DecoderRunner
from worker.model.decoder.weights import DecoderWeights, LayerWeights
from worker.model.errors import INT8_NEEDS_FUSED, NO_KERNELS, ModelUnsupported, needs_fused

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker.model.decoder.config import DecoderShape
    from worker.model.loader import ModelFiles
    from worker.step import Runner

BLOCK_SIZE: Final = 16


def chosen_kernels(kernels: str, threads: int) -> Native | None:
    """The build that ``--kernels`` names: ``auto``, ``none`` or a level.

    Raises:
        ModelUnsupported: it isn't there, or can't run here.
    """
    if kernels == "none":
        return None
    if kernels == "auto":
        return best(threads)
    try:
        return Native(kernels, threads)
    except NativeUnavailableError as error:
        raise ModelUnsupported(f"--kernels {kernels}: {error}") from error


def needed_kernels(kernels: str, threads: int, why: str) -> Native:
    """The build that ``--kernels`` names, for what can't do without any; ``why`` says what that is.

    Raises:
        ModelUnsupported: it isn't there, or can't run here, or is ``none``.
    """
    native = chosen_kernels(kernels, threads)
    if native is None and kernels == "none":
        raise ModelUnsupported(f"--kernels none: {why}; take --kernels auto")
    if native is None:
        raise ModelUnsupported(f"no native kernels are here: {why}; install a compiler, then octavo again")
    return native


def check_runnable(files: ModelFiles, native: Native | None, *, eight_bit_pages: bool) -> None:
    """Tells what `runner_of` would refuse before anything is read or measured.

    Raises:
        ModelUnsupported: weights, or keys and values, in eight bits of a model that the fused decoder can't run.
    """
    if not (eight_bit_pages or files.quantized):
        return
    why_not = NO_KERNELS if native is None else decoder.why_not_fused(files)
    if why_not is None:
        return
    raise needs_fused(files.name, why_not) if eight_bit_pages else ModelUnsupported(INT8_NEEDS_FUSED)


def runner_of(
    files: ModelFiles,
    native: Native | None,
    blocks: int,
    note: Callable[[str], None],
    *,
    eight_bit_pages: bool = False,
) -> tuple[Runner, str]:
    """A runner as a worker has it, and its name: the fused decoder or, where it can't be that, transformers.

    Raises:
        ModelUnsupported: K/V in eight bits, which only the fused decoder has.
    """
    reason = NO_KERNELS
    if native is not None:
        try:
            fused = decoder.load(
                files,
                native,
                num_blocks=blocks,
                block_size=BLOCK_SIZE,
                progress=note,
                eight_bit_pages=eight_bit_pages,
            )
        except NotFused as refused:
            reason = str(refused)
        else:
            return fused, "fused decoder, K/V int8" if eight_bit_pages else "fused decoder"
    if eight_bit_pages:
        raise needs_fused(files.name, reason)
    note(f"not by the fused decoder: {reason}")
    from worker.model import hf  # takes seconds, because it brings transformers' models along

    return hf.load(files, num_blocks=blocks, block_size=BLOCK_SIZE, progress=note), "transformers"


def made_up(
    native: Native, shape: DecoderShape, dtype: torch.dtype, *, quantized: bool, tokens: int, block_size: int = 16
) -> DecoderRunner:
    """A decoder with random weights and no rotation, with pages for so many tokens. Its shape has no biases, and no
    norms but those before attention, MLP and head."""
    extras = (shape.qk_norm, shape.sandwich, shape.qkv_bias, shape.output_bias, shape.mlp_bias)
    assert not any(extras), extras
    numbers = torch.Generator().manual_seed(0)

    def matrix(outputs: int, inputs: int) -> torch.Tensor:
        return torch.randn(outputs, inputs, generator=numbers).mul_(inputs**-0.5).to(dtype)

    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layers = tuple(
        LayerWeights(
            input_norm=torch.ones(shape.hidden),
            qkv=matrix(query + 2 * key, shape.hidden),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            output=matrix(shape.hidden, query),
            output_bias=None,
            post_attention_norm=None,
            mlp_norm=torch.ones(shape.hidden),
            gate=matrix(shape.intermediate, shape.hidden),
            gate_bias=None,
            up=matrix(shape.intermediate, shape.hidden),
            up_bias=None,
            down=matrix(shape.hidden, shape.intermediate),
            down_bias=None,
            post_mlp_norm=None,
        )
        for _ in shape.layers
    )
    embedding = matrix(shape.vocab, shape.hidden)
    weights = DecoderWeights(embedding=embedding, layers=layers, final_norm=torch.ones(shape.hidden), head=embedding)
    blocks = padded(tokens, block_size) // block_size
    model = NativeModel(shape, weights, (), num_blocks=blocks, block_size=block_size, quantized=quantized)
    return DecoderRunner(native, model, vocab_size=shape.vocab, block_size=block_size, context_length=tokens)
