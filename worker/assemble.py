"""Puts a worker's parts together: model, pool, scheduler, engine, and what the fleet is told about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvstore.registry import ModelCard, WorkerInfo
from worker.detokenize import TokenBytes, UnsupportedTokenizer
from worker.engine import Engine
from worker.model import hf, loader
from worker.model.errors import ModelUnsupported
from worker.sampling.sampler import TorchSampler
from worker.scheduling.block_pool import BlockPool
from worker.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker.config import WorkerConfig


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
    runner = hf.load(files, num_blocks=config.num_blocks, block_size=config.block_size, progress=progress)
    scheduler = Scheduler(
        BlockPool(config.num_blocks, config.block_size, config.cache_blocks),
        max_running=config.max_running,
        token_budget=config.step_tokens,
        chunk_tokens=config.chunk_tokens,
        context_length=files.context_length,
    )
    try:
        token_bytes = TokenBytes.from_json(files.tokenizer_json)
    except UnsupportedTokenizer as error:
        raise ModelUnsupported(f"{files.name}: {error}") from error
    engine = Engine(
        runner,
        scheduler,
        sampler=TorchSampler(),
        text_stream=token_bytes.stream,
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
    info = WorkerInfo(
        id=config.id,
        incarnation=incarnation,
        model=config.model_name or files.name,
        fingerprint=runner.fingerprint,
        tokenizer=card.tokenizer,
        device=files.device.type,
        dtype=str(files.dtype).removeprefix("torch."),
        block_size=config.block_size,
        context_length=engine.context_length,
        vocab_size=runner.vocab_size,
        kv_tokens=config.num_blocks * config.block_size,
        max_running=scheduler.max_running,
        metrics=metrics,
    )
    return Assembled(engine, info, card)
