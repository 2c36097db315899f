"""Puts a worker's parts together: model, pool, scheduler, engine, and what the fleet is told about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvstore.registry import ModelCard, WorkerInfo
from worker.detokenize import TokenBytes, UnsupportedTokenizer
from worker.engine import Engine
from worker.kernels.native import library as native
from worker.model import hf, loader
from worker.model.errors import ModelUnsupported
from worker.sampling.sampler import TorchSampler
from worker.scheduling.block_pool import BlockPool
from worker.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker.config import WorkerConfig
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
    runner = hf.load(files, num_blocks=config.num_blocks, block_size=config.block_size, progress=progress)
    scheduler = Scheduler(
        BlockPool(config.num_blocks, config.block_size, config.cache_blocks),
        max_running=config.max_running,
        token_budget=config.step_tokens,
        chunk_tokens=config.chunk_tokens,
        context_length=files.context_length,
    )
    engine = Engine(
        runner,
        scheduler,
        sampler=TorchSampler(native.best(torch.get_num_threads())),
        text_stream=texts.stream,
        eos_token_ids=files.eos_token_ids,
        fingerprint=runner.fingerprint,
    )
    card = ModelCard(
        fingerprint=runner.fingerprint,
        vocab_size=runner.vocab_size,
        eos_token_ids=files.eos_token_ids,
        tokenizer_json=files.tokenizer_json,
        tokenizer_config=files.tokenizer_config,
    )
    return Assembled(engine, _info(config, files, card, scheduler, incarnation, metrics), card)


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
        dtype=str(files.dtype).removeprefix("torch."),
        block_size=config.block_size,
        context_length=scheduler.context_length,
        vocab_size=card.vocab_size,
        kv_tokens=config.num_blocks * config.block_size,
        max_running=scheduler.max_running,
        metrics=metrics,
    )
