"""What a worker's lease and load say, and how they are written and read."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvstore.errors import MalformedValue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

READY = "ready"
DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's lease: what it is, and what it measured at its last heartbeat."""

    id: str
    incarnation: str
    model: str
    fingerprint: str
    tokenizer: str = ""
    """``ModelCard.tokenizer`` of its card: workers that agree on it take the same token ids."""
    state: str = READY
    """READY or DRAINING; a draining worker is sent no more jobs."""
    device: str = "cpu"
    dtype: str = "float32"
    block_size: int = 16
    """Tokens in a block."""
    context_length: int = 0
    """Tokens that a prompt and its answer may have together on this worker."""
    vocab_size: int = 0
    kv_tokens: int = 0
    max_running: int = 0
    running: int = 0
    waiting: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    blocks_used: int = 0
    prefill_tok_s: float = 0.0
    """Prompt tokens that it computes in a second, by its own measure; 0: not measured yet, as for the next three."""
    step_ms: float = 0.0
    """A step that decodes one sequence."""
    sequence_ms: float = 0.0
    """What each further sequence adds to it."""
    fetch_tok_s: float = 0.0
    """Tokens of pages that it takes from the page store in a second."""
    index: str = ""
    """Whether its ``held`` set is what its pool offers: "exact", or "degraded" while it is repaired."""
    metrics: str = ""
    """HOST:PORT of the Prometheus endpoint."""
    steps: int = 0
    """Since its start, as all totals that follow."""
    busy_s: float = 0.0
    """Seconds that its steps took."""
    computed_tokens: int = 0
    """Tokens that its steps computed: of prompts, recomputed ones, and one for each that a sequence decodes."""
    output_tokens: int = 0
    prefix_queried: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hit: int = 0
    """Those that were found."""
    heartbeat_age_ms: int = 0
    """Set by ``Registry.workers``, as is the next; ignored when written."""
    heartbeat_ms: int = 0
    """When its last heartbeat came, by the broker's clock."""


class Load(NamedTuple):
    """What routers have charged to a worker and nobody has refunded yet. A named tuple, as each decision makes one for
    each worker."""

    jobs: int = 0
    tokens: int = 0
    """Of prompts and answers, every answer at its maximum."""
    prefill: int = 0
    """Prompt tokens, beyond those predicted to be cached, of jobs without a token yet."""
    sequences: int = 0
    """Choices of those jobs: as many places as they take when they run."""


@dataclass(frozen=True, slots=True)
class Renewed:
    """What a heartbeat found."""

    held_lease: bool
    """False: another incarnation holds the id, and this one's writes are refused."""
    held_count: int
    """Blocks that the prefix index has for this incarnation."""


LOAD_FIELDS: Final = ("jobs", "tokens", "prefill", "sequences")
MOST_DIGITS: Final = 15
"""Of a number in a load, as scripts have it: doubles are exact up to there."""


def parse_load(values: Sequence[bytes | None]) -> Load:
    """From the values of LOAD_FIELDS; what is no number counts as nothing."""
    return Load(*(int(value) if value and value.isdigit() and len(value) <= MOST_DIGITS else 0 for value in values))


# The id is in the key; the incarnation is written by the script itself.
_NOT_STORED = frozenset({"id", "incarnation", "heartbeat_age_ms", "heartbeat_ms"})


def _rate(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError(f"{text!r:.40} is no rate")
    return value


# By the type of a field, for all but text.
_READ: dict[str, Callable[[str], Any]] = {"int": int, "float": _rate}


def lease_fields(info: WorkerInfo) -> list[Any]:
    """Field, value of all that a lease stores, as the server takes it."""
    stored: list[Any] = []
    for field in fields(info):
        if field.name not in _NOT_STORED:
            stored += [field.name, getattr(info, field.name)]
    return stored


def parse_lease(worker: bytes, lease: Any, age_ms: int, beat_ms: int = 0) -> WorkerInfo:
    """What a worker's lease says. ``age_ms``, ``beat_ms``: of its last heartbeat. Raises MalformedValue."""
    if not isinstance(lease, dict):
        raise MalformedValue(f"the lease of worker {worker!r} is no hash")
    values: dict[str, Any] = {"id": worker, "heartbeat_age_ms": age_ms, "heartbeat_ms": beat_ms}
    try:
        values["id"] = worker.decode()
        for field in fields(WorkerInfo):
            # A worker of another version may not have every field that has a default.
            unsaid = field.name.encode() not in lease and field.default is not MISSING
            if field.name in values or unsaid:
                continue
            text = lease[field.name.encode()].decode()
            values[field.name] = _READ.get(str(field.type), str)(text)
    except (KeyError, ValueError) as error:
        raise MalformedValue(f"the lease of worker {worker!r} does not parse: {error}") from error
    return WorkerInfo(**values)
