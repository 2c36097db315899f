"""Models with weights: found, loaded and given their pages, by the fused decoder or through transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from worker.model import loader
from worker.model.decoder import runner as decoder
from worker.model.decoder.config import NotFused
from worker.model.digest import joined_digest
from worker.model.errors import NO_KERNELS, ModelUnsupported, needs_fused
from worker.model.loader import INT8
from worker.model.prepared import Prepared, kernels_of, texts_of
from worker.sampling.sampler import sampler_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker.config import WorkerConfig
    from worker.kernels.native.library import Native
    from worker.model.decoder.runner import DecoderRunner
    from worker.model.hf import HfRunner
    from worker.model.loader import ModelFiles


def prepare(config: WorkerConfig, progress: Callable[[str], None]) -> Prepared:
    """Loads the model that the configuration names. Takes seconds.

    Raises:
        ModelError: it can't be found, read or run.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    files = loader.resolve(
        config.model, cache_dir=config.cache_dir, dtype=config.dtype, device=config.device, progress=progress
    )
    texts = texts_of(files.name, files.tokenizer_json)  # before the weights are read, which takes longer
    kernels = kernels_of(config.kernels, torch.get_num_threads(), progress)
    runner = _runner(config, files, kernels, progress)
    sampler = sampler_for(files.device, kernels)
    return Prepared(
        name=files.name,
        runner=runner,
        sampler=sampler,
        texts=texts,
        fingerprint=joined_digest((runner.fingerprint, sampler.digest)),
        device=files.device.type,
        dtype=files.dtype_name,
        context_length=files.context_length,
        eos_token_ids=files.eos_token_ids,
        tokenizer_json=files.tokenizer_json,
        tokenizer_config=files.tokenizer_config,
    )


def _runner(
    config: WorkerConfig, files: ModelFiles, kernels: Native | None, progress: Callable[[str], None]
) -> HfRunner | DecoderRunner:
    """The fused decoder, or transformers' model where it can't be that.

    Raises:
        ModelUnsupported: K/V in eight bits of a model that isn't run by the fused decoder, which alone has them.
    """
    eight_bit_pages = _eight_bit_pages(config)
    why_not = NO_KERNELS
    if kernels is not None:
        try:
            runner = decoder.load(
                files,
                kernels,
                num_blocks=config.num_blocks,
                block_size=config.block_size,
                eight_bit_pages=eight_bit_pages,
                progress=progress,
            )
        except NotFused as reason:
            why_not = str(reason)
            progress(f"not by the fused decoder: {reason}")
        else:
            torch.set_num_threads(1)  # what is left to it is small, and its threads would only be in the kernels' way
            return runner
    if eight_bit_pages:
        raise needs_fused(files.name, why_not)
    from worker.model import hf  # takes seconds, because it brings transformers' models along

    return hf.load(files, num_blocks=config.num_blocks, block_size=config.block_size, progress=progress)


def _eight_bit_pages(config: WorkerConfig) -> bool:
    if config.kv_dtype not in ("auto", INT8):
        raise ModelUnsupported(f"kv-dtype {config.kv_dtype!r} is not one of auto, {INT8}")
    return config.kv_dtype == INT8
