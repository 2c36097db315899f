"""Puts a worker's parts together: model, pool, scheduler, engine, and what the fleet is told about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvstore.registry import ModelCard, WorkerInfo
from worker.detokenize import TokenBytes, UnsupportedTokenizer
from worker.engine import Engine
from worker.kernels.native.library import Native, NativeUnavailableError, best
from worker.model import loader
from worker.model.cache import joined_digest
from worker.model.decoder import runner as decoder
from worker.model.decoder.config import NotFused
from worker.model.errors import ModelUnsupported
from worker.model.loader import INT8
from worker.sampling.sampler import sampler_for
from worker.scheduling.block_pool import BlockPool
from worker.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker.config import WorkerConfig
    from worker.model.decoder.runner import DecoderRunner
    from worker.model.hf import HfRunner
    from worker.model.loader import ModelFiles


@dataclass(frozen=True, slots=True)
class Assembled:
    """A worker ready to serve."""

    engine: Engine
    info: WorkerInfo
    card: ModelCard


def build(config: WorkerConfig, incarnation: str, metrics: str, progress: Callable[[str], None]) -> Assembled:
    """Loads the model and builds the engine around it. Takes seconds; run it in a thread.

    Raises:
        ModelError: the model can't be found, read or run.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    files = loader.resolve(
        config.model, cache_dir=config.cache_dir, dtype=config.dtype, device=config.device, progress=progress
    )
    texts = _token_bytes(files)  # before the weights are read, which takes longer
    kernels = _kernels(config, progress)
    runner = _runner(config, files, kernels, progress)
    sampler = sampler_for(files.device, kernels)
    fingerprint = joined_digest((runner.fingerprint, sampler.digest))
    scheduler = Scheduler(
        BlockPool(config.num_blocks, config.block_size, config.cache_blocks, config.block_run),
        max_running=config.max_running,
        token_budget=config.step_tokens,
        chunk_tokens=config.chunk_tokens,
        context_length=files.context_length,
    )
    engine = Engine(
        runner,
        scheduler,
        sampler=sampler,
        text_stream=texts.stream,
        eos_token_ids=files.eos_token_ids,
        fingerprint=fingerprint,
    )
    card = ModelCard(
        fingerprint=fingerprint,
        vocab_size=runner.vocab_size,
        eos_token_ids=files.eos_token_ids,
        tokenizer_json=files.tokenizer_json,
        tokenizer_config=files.tokenizer_config,
    )
    return Assembled(engine, _info(config, files, card, scheduler, incarnation, metrics), card)


def _kernels(config: WorkerConfig, progress: Callable[[str], None]) -> Native | None:
    """Raises ModelUnsupported for kernels that were asked for and can't be had."""
    threads = torch.get_num_threads()
    if config.kernels == "none":
        return None
    if config.kernels != "auto":
        try:
            return Native(config.kernels, threads)
        except NativeUnavailableError as error:
            raise ModelUnsupported(f"--kernels {config.kernels}: {error}") from error
    found = best(threads)
    progress("no native kernels: torch does all, slower" if found is None else f"native kernels: {found.level}")
    return found


def _runner(
    config: WorkerConfig, files: ModelFiles, kernels: Native | None, progress: Callable[[str], None]
) -> HfRunner | DecoderRunner:
    """The fused decoder, or transformers' model where it can't be that.

    Raises:
        ModelUnsupported: K/V in eight bits of a model that isn't run by the fused decoder, which alone has them.
    """
    eight_bit_pages = _eight_bit_pages(config)
    why_not = "there are no native kernels"
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
        raise ModelUnsupported(
            f"--kv-dtype int8 needs the fused decoder, which can't run {files.name} here: {why_not}; "
            "take --kv-dtype auto"
        )
    from worker.model import hf  # takes seconds, because it brings transformers' models along

    return hf.load(files, num_blocks=config.num_blocks, block_size=config.block_size, progress=progress)


def _eight_bit_pages(config: WorkerConfig) -> bool:
    if config.kv_dtype not in ("auto", INT8):
        raise ModelUnsupported(f"kv-dtype {config.kv_dtype!r} is not one of auto, {INT8}")
    return config.kv_dtype == INT8


def _token_bytes(files: ModelFiles) -> TokenBytes:
    try:
        return TokenBytes.from_json(files.tokenizer_json)
    except UnsupportedTokenizer as error:
        raise ModelUnsupported(f"{files.name}: {error}") from error


def _info(
    config: WorkerConfig, files: ModelFiles, card: ModelCard, scheduler: Scheduler, incarnation: str, metrics: str
) -> WorkerInfo:
    """What the fleet is told: the limits that hold, not those that were asked for."""
    return WorkerInfo(
        id=config.id,
        incarnation=incarnation,
        model=config.model_name or files.name,
        fingerprint=card.fingerprint,
        tokenizer=card.tokenizer,
        device=files.device.type,
        dtype=files.dtype_name,
        block_size=config.block_size,
        context_length=scheduler.context_length,
        vocab_size=card.vocab_size,
        kv_tokens=config.num_blocks * config.block_size,
        max_running=scheduler.max_running,
        metrics=metrics,
    )
