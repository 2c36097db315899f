"""Puts a worker's parts together: model, pool, scheduler, engine, and what the fleet is told about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.page import PageFormat
from kvstore.registry import ModelCard, WorkerInfo
from worker.engine import Engine
from worker.measure import measure
from worker.model import simulated
from worker.model.errors import NoRoom
from worker.rates import UNMEASURED, Measured
from worker.scheduling.block_pool import BlockPool
from worker.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker.config import WorkerConfig
    from worker.model.prepared import Prepared


@dataclass(frozen=True, slots=True)
class Assembled:
    """A worker ready to serve."""

    engine: Engine
    info: WorkerInfo
    card: ModelCard
    form: PageFormat
    """Of its pages, where it has any."""


def build(config: WorkerConfig, incarnation: str, metrics: str, progress: Callable[[str], None]) -> Assembled:
    """Loads the model and builds the engine around it. Takes seconds; run it in a thread.

    Raises:
        ModelError: the model can't be found, read or run, or memory has no room for its pool.
    """
    try:
        model = _prepared(config, progress)
    except NoRoom as error:
        raise error.as_option(config.kv_tokens) from error
    scheduler = Scheduler(
        BlockPool(config.num_blocks, config.block_size, config.cache_blocks, config.block_run),
        max_running=config.max_running,
        token_budget=config.step_tokens,
        chunk_tokens=config.chunk_tokens,
        context_length=model.context_length,
    )
    engine = Engine(
        model.runner,
        scheduler,
        sampler=model.sampler,
        text_stream=model.texts.stream,
        eos_token_ids=model.eos_token_ids,
        fingerprint=model.fingerprint,
        memory=None if config.pages is None else model.runner,
    )
    card = ModelCard(
        fingerprint=model.fingerprint,
        vocab_size=model.runner.vocab_size,
        eos_token_ids=model.eos_token_ids,
        tokenizer_json=model.tokenizer_json,
        tokenizer_config=model.tokenizer_config,
    )
    rates = _measured(model, min(config.step_tokens, model.context_length), progress)
    form = PageFormat(model.fingerprint, model.runner.page_layout, model.runner.block_size, model.runner.page_bytes)
    return Assembled(engine, _info(config, model, card, scheduler, rates, incarnation, metrics), card, form)


def _prepared(config: WorkerConfig, progress: Callable[[str], None]) -> Prepared:
    if simulated.is_simulated(config.model):
        return simulated.prepare(config, progress)
    from worker.model import real  # takes seconds, because it brings torch and transformers along

    return real.prepare(config, progress)


def _measured(model: Prepared, most_tokens: int, progress: Callable[[str], None]) -> Measured:
    """How fast it is; a guess when it fails at that, for it may serve shorter prompts all the same."""
    try:
        found = measure(model.runner, most_tokens=most_tokens)
    except Exception as error:  # a runner may raise anything
        progress(f"its speed could not be measured: {type(error).__name__}: {error}")
        return UNMEASURED
    progress(
        f"about {found.prefill_tok_s:.0f} prompt tokens a second; a step takes {found.step_ms:.1f} ms, "
        f"and {found.sequence_ms:.2f} ms for each further sequence"
    )
    return found


def _info(
    config: WorkerConfig,
    model: Prepared,
    card: ModelCard,
    scheduler: Scheduler,
    rates: Measured,
    incarnation: str,
    metrics: str,
) -> WorkerInfo:
    """What the fleet is told: the limits that hold, not those that were asked for."""
    return WorkerInfo(
        id=config.id,
        incarnation=incarnation,
        model=config.model_name or model.name,
        fingerprint=card.fingerprint,
        tokenizer=card.tokenizer,
        device=model.device,
        dtype=model.dtype,
        block_size=config.block_size,
        context_length=scheduler.context_length,
        vocab_size=card.vocab_size,
        kv_tokens=config.num_blocks * config.block_size,
        max_running=scheduler.max_running,
        prefill_tok_s=rates.prefill_tok_s,
        step_ms=rates.step_ms,
        sequence_ms=rates.sequence_ms,
        metrics=metrics,
    )
