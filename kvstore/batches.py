"""What is known of batches: files of requests that run in the background. Synchronous, as rq is.

::

    queued -> running -> completed
       |        |  \\---> failed          it could not go on; what is done is kept
       |        v
       |    cancelling -> cancelled
       \\----------------> cancelled

What failed or was cancelled can be queued again, and goes on where it was.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from redis import ConnectionPool, Redis
from redis.backoff import ExponentialBackoff
from redis.connection import parse_url
from redis.exceptions import NoScriptError, RedisError
from redis.retry import Retry

from kvstore.errors import BrokerUrl, MalformedValue
from kvstore.keys import Keys
from kvstore.scripts import load_scripts
from kvstore.translation import translate

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

KEPT_S: Final = 30 * 86_400
"""How long after its end a batch is known."""
IN_FLIGHT: Final = 4
"""Lines of a batch that run at once, where nobody says how many: few enough that those who wait for answers hardly
notice, on one worker. With sixteen their first tokens came half as late again."""
NO_COUNTS: Final[Mapping[str, int]] = MappingProxyType({})
TIMEOUT_S: Final = 5.0
RETRIES: Final = 3


class BatchState(StrEnum):
    """Where a batch stands."""

    QUEUED = "queued"
    RUNNING = "running"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        return self in (BatchState.COMPLETED, BatchState.CANCELLED, BatchState.FAILED)


@dataclass(frozen=True, slots=True)
class Settings:
    """What whoever submitted a batch said."""

    name: str = ""
    """For people: the file's."""
    total: int = 0
    """Lines. 0: a worker will check the file first, and count them."""
    model: str = ""
    """Of lines that name none."""
    in_flight: int = IN_FLIGHT
    """Lines that run at once, at most; 0: as many as whoever runs it takes."""
    priority: int = -10
    targets: str = ""
    """HOST:PORT of gateways, with commas between them; empty: those that the worker knows."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    input_file: str = ""
    """Id of the uploaded file that it was made of; empty: it was submitted as it is."""
    endpoint: str = ""
    """The url that each of its lines must have; empty: any."""
    tenant: str = ""
    """Whose it is, and as whose its lines run; empty: nobody's, as the key of whoever runs it says."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a batch is."""

    done: int = 0
    """Lines with an answer."""
    failed: int = 0
    """Lines that ended with an error."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    lines_per_s: float = 0.0
    """Since a worker took it last."""
    trouble: str = ""
    """What lines wait for; empty: nothing."""


@dataclass(frozen=True, slots=True)
class Batch:
    """All that is known of one. Times are milliseconds of Redis' clock; 0: not yet."""

    id: str
    state: BatchState
    settings: Settings = Settings()
    progress: Progress = Progress()
    created_ms: int = 0
    started_ms: int = 0
    ended_ms: int = 0
    error: str = ""
    """Why it failed."""

    @property
    def eta_s(self) -> float | None:
        """Seconds until it has ended, if it goes on as it did; None: nobody knows."""
        left = self.settings.total - self.progress.done - self.progress.failed
        rate = self.progress.lines_per_s
        return left / rate if self.state is BatchState.RUNNING and rate > 0 else None

    def as_dict(self) -> dict[str, Any]:
        """As JSON shows it."""
        told = {"id": self.id, "state": str(self.state), **asdict(self.settings), **asdict(self.progress)}
        times = {"created_ms": self.created_ms, "started_ms": self.started_ms, "ended_ms": self.ended_ms}
        return {**told, "eta_s": self.eta_s, **times, "error": self.error}


class BatchStore:
    """The batches of one fleet. All methods raise BrokerError; safe in several threads."""

    def __init__(self, url: str, namespace: str) -> None:
        """Connects when it is first used. Raises BrokerUrl for what is no URL of a broker, ValueError for a namespace
        that is none."""
        self.keys = Keys(namespace)
        self.redis = _client(url)
        self._url = url
        self._scripts = load_scripts()

    def create(self, batch_id: str, settings: Settings) -> None:
        """A new batch; one that is there already is left as it is."""
        self._move(batch_id, (), BatchState.QUEUED, "created_ms", _flat(asdict(settings)))

    def reopen(self, batch_id: str) -> BatchState | None:
        """One that failed or was cancelled is queued again. The state that it is in now; None: it is unknown."""
        before = (BatchState.FAILED, BatchState.CANCELLED)
        return self._move(batch_id, before, BatchState.QUEUED, "", {"error": ""})

    def start(self, batch_id: str) -> BatchState | None:
        """A worker takes it, again or for the first time. The state that it is in then; None: it is unknown."""
        return self._move(batch_id, (BatchState.QUEUED, BatchState.RUNNING), BatchState.RUNNING, "started_ms", {})

    def count(self, batch_id: str, total: int) -> BatchState | None:
        """A worker has checked its file, which has so many lines. The state that it is in."""
        before = (BatchState.RUNNING, BatchState.CANCELLING)
        return self._move(batch_id, before, None, "", {"total": json.dumps(total)})

    def note(self, batch_id: str, progress: Progress) -> BatchState | None:
        """How far it is. The state that it is in."""
        return self._move(batch_id, (BatchState.RUNNING, BatchState.CANCELLING), None, "", _flat(asdict(progress)))

    def end(
        self, batch_id: str, state: BatchState, error: str = "", counts: Mapping[str, int] = NO_COUNTS
    ) -> BatchState | None:
        """It ends like this, unless it had ended; `counts` are fields of its progress. The state that it is in now."""
        before = (BatchState.QUEUED, BatchState.RUNNING, BatchState.CANCELLING)
        return self._move(batch_id, before, state, "ended_ms", {"error": error, **_flat(counts)})

    def cancel(self, batch_id: str) -> BatchState | None:
        """Ends one that nobody has begun; whoever runs one is told. The state that it is in now; None: it is
        unknown."""
        state = self._move(batch_id, (BatchState.QUEUED,), BatchState.CANCELLED, "ended_ms", {})
        if state is BatchState.RUNNING:
            state = self._move(batch_id, (BatchState.RUNNING,), BatchState.CANCELLING, "", {})
        return state

    def get(self, batch_id: str) -> Batch | None:
        """None: it is unknown, or ended too long ago."""
        with self.translated():
            found: Any = self.redis.hgetall(self.keys.batch(batch_id))
        return _parsed(batch_id, found) if found else None

    def all(self) -> list[Batch]:
        """Those that are known, the latest first. Forgets the ids of those that are not."""
        with self.translated():
            ids: Any = self.redis.zrange(self.keys.batches, 0, -1, desc=True)
        found = [(each.decode(), self.get(each.decode())) for each in ids]
        if gone := [batch_id for batch_id, batch in found if batch is None]:
            with self.translated():
                self.redis.zrem(self.keys.batches, *gone)
                self.redis.srem(self.keys.open_batches, *gone)
        return [batch for _, batch in found if batch is not None]

    def open_ids(self) -> list[str]:
        """Of those that have not ended."""
        with self.translated():
            ids: Any = self.redis.smembers(self.keys.open_batches)
        return sorted(each.decode() for each in ids)

    def open_of(self, tenant: str) -> int:
        """How many of a tenant's have not ended."""
        ids = self.open_ids()
        with self.translated(), self.redis.pipeline(transaction=False) as pipeline:
            for batch_id in ids:
                pipeline.hget(self.keys.batch(batch_id), "tenant")
            return pipeline.execute().count(json.dumps(tenant).encode())

    def due(self, chore: str, every_s: int) -> bool:
        """Whether nobody has begun it for so many seconds. Who asked has begun it then."""
        with self.translated():
            return bool(self.redis.set(self.keys.chore(chore), 1, nx=True, ex=every_s))

    def script(self, name: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        """Runs ``lua/<name>.lua``."""
        script = self._scripts[name]
        with self.translated():
            try:
                return self.redis.evalsha(script.sha1, len(keys), *keys, *arguments)
            except NoScriptError:
                return self.redis.eval(script.source, len(keys), *keys, *arguments)

    def close(self) -> None:
        """Closes the connections."""
        self.redis.close()

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Turns exceptions of the Redis client into those of this package."""
        try:
            yield
        except RedisError as error:
            raise translate(error, self._url) from error

    def _move(
        self, batch_id: str, before: tuple[BatchState, ...], after: BatchState | None, stamp: str, told: dict[str, str]
    ) -> BatchState | None:
        keys = (self.keys.batch(batch_id), self.keys.batches, self.keys.open_batches)
        ttl = str(KEPT_S * 1000) if after is not None and after.ended else ""
        flat = [part for pair in told.items() for part in pair]
        among = f" {' '.join(before)} " if before else ""
        state = self.script("batch", keys, (batch_id, among, after or "", stamp, ttl, *flat))
        return _state(batch_id, state) if state else None


def _client(url: str) -> Redis:
    # Options of the URL first, ours last: as kvstore.client has it, but for a client that blocks.
    try:
        options: dict[str, Any] = dict(parse_url(url))  # type: ignore[no-untyped-call]
    except ValueError:
        raise BrokerUrl("not a URL of a broker: redis://, rediss:// or unix://, host, port and database") from None
    retry = Retry(ExponentialBackoff(cap=1.0, base=0.05), RETRIES)
    options.update(protocol=2, decode_responses=False, socket_timeout=TIMEOUT_S, retry=retry)
    return Redis.from_pool(ConnectionPool(**options))


def _flat(values: Mapping[str, Any]) -> dict[str, str]:
    """As fields of a hash: each is JSON."""
    return {name: json.dumps(told) for name, told in values.items()}


def _parsed(batch_id: str, found: Mapping[bytes, bytes]) -> Batch:
    told = {name.decode(): value.decode() for name, value in found.items()}
    try:
        settings, progress = (
            {each.name: json.loads(told[each.name]) for each in fields(kind) if each.name in told}
            for kind in (Settings, Progress)
        )
        return Batch(
            id=batch_id,
            state=BatchState(told["state"]),
            settings=Settings(**settings),
            progress=Progress(**progress),
            created_ms=int(told.get("created_ms", 0)),
            started_ms=int(told.get("started_ms", 0)),
            ended_ms=int(told.get("ended_ms", 0)),
            error=told.get("error", ""),
        )
    except (KeyError, ValueError, TypeError) as error:
        raise MalformedValue(f"batch {batch_id}: {error}") from error


def _state(batch_id: str, state: bytes) -> BatchState:
    try:
        return BatchState(state.decode())
    except ValueError as error:
        raise MalformedValue(f"batch {batch_id}: {error}") from error
