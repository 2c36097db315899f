"""Who lives: leases of workers and gateways, what workers are charged with, and the models they serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.client import Broker

LEASE_TTL_MS = 3000
HEARTBEAT_S = 1.0
MODEL_TTL_MS = 60_000
MODEL_RENEW_S = 20.0


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's lease: what it is, and what it measured at its last heartbeat."""

    id: str
    incarnation: str
    model: str
    fingerprint: str
    state: str = "ready"
    """``ready`` or ``draining``."""
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
    metrics: str = ""
    """HOST:PORT of the Prometheus endpoint."""
    heartbeat_age_ms: int = 0
    """Set by ``Registry.workers``; ignored when written."""


@dataclass(frozen=True, slots=True)
class Load:
    """What routers have charged to a worker and nobody has refunded yet."""

    jobs: int = 0
    tokens: int = 0
    """Prompt and answer tokens, the answer at its maximum."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a gateway needs to serve a model without having its files."""

    name: str
    fingerprint: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer_json: bytes
    tokenizer_config: bytes
    """JSON: bos_token, eos_token, chat_template, ..."""


def new_incarnation() -> str:
    """16 hex characters that name one life of a process. Never reused."""
    raise NotImplementedError


class Registry:
    """Leases, loads and model cards."""

    def __init__(self, broker: Broker, *, lease_ttl_ms: int = LEASE_TTL_MS, model_ttl_ms: int = MODEL_TTL_MS) -> None:
        self._broker = broker
        self._lease_ttl_ms = lease_ttl_ms
        self._model_ttl_ms = model_ttl_ms

    async def register(self, info: WorkerInfo) -> None:
        """Takes the lease of ``info.id``. Waits for a lease that is about to lapse; raises WorkerIdTaken when its
        holder goes on renewing it."""
        raise NotImplementedError

    async def renew(self, info: WorkerInfo) -> bool:
        """Heartbeat: extends the lease and writes what ``info`` says. False: another incarnation holds the id. A
        lease that vanished is made again."""
        raise NotImplementedError

    async def leave(self, worker: str, incarnation: str) -> None:
        """Gives the lease back. Jobs still in the stream are ended by the next ``Jobs.end_orphans``."""
        raise NotImplementedError

    async def workers(self) -> list[WorkerInfo]:
        """Live workers, by id."""
        raise NotImplementedError

    async def loads(self, workers: Sequence[WorkerInfo]) -> dict[str, Load]:
        """By worker id, for the incarnations given. One round trip."""
        raise NotImplementedError

    async def renew_gateway(self, incarnation: str) -> None:
        """Heartbeat of a gateway."""
        raise NotImplementedError

    async def leave_gateway(self, incarnation: str) -> None:
        """Gives a gateway's lease back."""
        raise NotImplementedError

    async def live_gateways(self, incarnations: Iterable[str]) -> set[str]:
        """Those of ``incarnations`` whose lease has not lapsed. One round trip."""
        raise NotImplementedError

    async def publish_model(self, card: ModelCard) -> None:
        """Writes or extends a model's card. To be repeated every MODEL_RENEW_S."""
        raise NotImplementedError

    async def model(self, fingerprint: str) -> ModelCard | None:
        """None when no worker has published it lately, or what is there does not parse (counted)."""
        raise NotImplementedError
