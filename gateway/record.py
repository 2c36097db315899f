"""A decision as it is kept with its job, for operators and for replay."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from gateway.cost import cached
from octavo.v1 import fleet_pb2

if TYPE_CHECKING:
    from gateway.prefixes import Index
    from gateway.router import Considered, Decision

MOST_CANDIDATES: Final = 32
"""Candidates that a record has: all of a fleet of that size, of a larger one the cheapest. Each takes 150 bytes."""


def record_of(decision: Decision, request_id: str, index: Index, unix_ms: int) -> fleet_pb2.RouteRecord:
    """The record of a decision that has chosen somebody. `unix_ms`: the time, by this machine's clock."""
    chosen, work = decision.chosen, decision.work
    if chosen is None:
        raise ValueError("a decision without a choice is not recorded")
    kept = decision.considered
    if len(kept) > MOST_CANDIDATES:
        costs = [-math.inf if each is chosen else each.cost.total_s for each in kept]
        cheapest = sorted(range(len(kept)), key=costs.__getitem__)
        kept = tuple(kept[at] for at in sorted(cheapest[:MOST_CANDIDATES]))
    record = fleet_pb2.RouteRecord(
        request_id=request_id,
        policy=decision.policy,
        index=index,
        prompt_tokens=work.prompt,
        answer_tokens=work.answer * work.choices,
        mean_answer_tokens=work.others,
        choices=work.choices,
        chosen=next(index for index, each in enumerate(kept) if each is chosen),
        decided_unix_ms=unix_ms,
        predicted_cached_tokens=cached(work, chosen.candidate),
        repeats_per_s=work.repeats,
    )
    for each in kept:
        _add(record, each)
    return record


def _add(record: fleet_pb2.RouteRecord, considered: Considered) -> None:
    each, cost = considered.candidate, considered.cost
    record.candidates.add(
        worker=each.worker,
        incarnation=each.incarnation,
        held_tokens=each.held,
        stored_tokens=each.stored,
        jobs=each.load.jobs,
        sequences=each.load.sequences,
        tokens=each.load.tokens,
        prefill_tokens=each.load.prefill,
        prefill_tokens_per_s=each.rates.prefill_tok_s,
        step_ms=each.rates.step_s * 1000,
        sequence_ms=each.rates.sequence_s * 1000,
        fetch_tokens_per_s=each.rates.fetch_tok_s,
        max_running=each.max_running,
        kv_tokens=each.kv_tokens,
        used_tokens=each.used,
        wait_s=cost.wait_s,
        prefill_s=cost.prefill_s,
        fetch_s=cost.fetch_s,
        decode_s=cost.decode_s,
        saved_s=cost.saved_s,
        verdict=considered.verdict,
    )
