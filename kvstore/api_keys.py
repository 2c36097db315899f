"""API keys: who holds which, and what their tenants may ask for.

A key is 256 random bits, told once, when it is made. What is kept is its SHA-256, so that nobody learns a key from the
store. A slow hash would add nothing: it protects what can be guessed, and every call would have to pay for it.

Keys are fields with a JSON object each, in a hash of the broker or in a file (``kvstore.key_file``) alike::

    <SHA-256 of the key, in hex>    {"tenant": "acme", "name": "ci", "operator": false, "created_ms": 1764547200000}
    tenant:acme                     {"requests_per_minute": 60, "tokens_per_minute": 100000, "concurrency": 8,
                                     "max_priority": null}
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvstore.errors import KeysDamaged
from kvstore.tenants import NO_QUOTA, TENANT, Quota

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.client import Broker

MARK: Final = "octavo-"
"""What a key begins with, so that it is known for one where it should not be."""
MAX_KEY: Final = 256
"""Characters that are looked at."""
MAX_NAME: Final = 64
MAX_LIMIT: Final = 10**12
"""Keeps sums exact in a script's doubles."""
LIMITS: Final = tuple(each.name for each in fields(Quota))
_ID: Final = 12
_OF_TENANT: Final = "tenant:"
_VERSION: Final = "version"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is kept of a key."""

    digest: str
    """SHA-256 of the key, in hex."""
    tenant: str
    name: str = ""
    """For people."""
    operator: bool = False
    """It may ask what concerns the whole fleet."""
    created_ms: int = 0
    """Since the epoch."""

    @property
    def id(self) -> str:
        """Names it for those who may not see it."""
        return self.digest[:_ID]


@dataclass(frozen=True, slots=True)
class KeyBook:
    """All keys that hold, and the limits of their tenants."""

    keys: Mapping[str, ApiKey] = field(default_factory=dict)
    """By digest."""
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    """By tenant; who is not in it has no limits."""

    def holder(self, key: str) -> ApiKey | None:
        """What is known of a key; None: nothing.

        How long the look takes may say how far two hashes agree. Nobody can choose a key by the bits of its hash, so
        that tells nothing of any key, and needs no comparison in constant time.
        """
        return self.keys.get(digest_of(key)) if len(key) <= MAX_KEY else None

    def quota(self, tenant: str) -> Quota:
        """What a tenant may ask for."""
        return self.quotas.get(tenant, NO_QUOTA)


class KeyStore(Protocol):
    """Where keys are kept."""

    async def read(self, known: str) -> tuple[str, KeyBook] | None:
        """What holds now, under a version; None: what had the version ``known`` (empty: none) still holds. Raises
        KeysDamaged, BrokerError, OSError."""

    async def put(self, changes: Mapping[str, Mapping[str, Any] | None], known: str | None = None) -> bool:
        """Writes fields, or takes out those that are None; only while that version holds, if one is ``known``. Whether
        it did so. Raises as ``read``."""


class RedisKeys:
    """Keys in a hash of the broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def read(self, known: str) -> tuple[str, KeyBook] | None:
        name = self._broker.keys.api_keys
        # First: a change between the two is found by the next look.
        version = (await self._broker.call("HGET", name, _VERSION) or b"0").decode(errors="replace")
        if version == known:
            return None
        stored = await self._broker.call("HGETALL", name)
        texts = {each.decode(errors="replace"): value for each, value in stored.items()}
        texts.pop(_VERSION, None)
        try:
            return version, book_of({each: json.loads(value) for each, value in texts.items()})
        except ValueError as error:
            raise KeysDamaged(f"the API keys in the broker are damaged: {error}") from error

    async def put(self, changes: Mapping[str, Mapping[str, Any] | None], known: str | None = None) -> bool:
        # No number that is counted up: a server that lost its data, or its last changes, would come to one again that
        # gateways know already, with other keys.
        args = [secrets.token_hex(8), known or ""]
        args += [part for name, value in changes.items() for part in (name, "" if value is None else json.dumps(value))]
        return bool(await self._broker.script("keys", [self._broker.keys.api_keys], args))


def new_key() -> str:
    """A key that nobody has had before."""
    return MARK + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    """What is kept of a key: see ``ApiKey.digest``."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def entry_of(key: ApiKey) -> dict[str, dict[str, Any]]:
    """A key, as it is written."""
    return {key.digest: {name: value for name, value in asdict(key).items() if name != "digest"}}


def limits_of(tenant: str, quota: Quota) -> dict[str, dict[str, Any] | None]:
    """A tenant's limits, as they are written."""
    return {_OF_TENANT + tenant: asdict(quota) if quota else None}


def book_of(entries: Mapping[str, Any]) -> KeyBook:
    """Keys and limits from what was written. Raises ValueError for what is neither, with its field."""
    keys: dict[str, ApiKey] = {}
    quotas: dict[str, Quota] = {}
    for name, value in entries.items():
        if not isinstance(value, dict):
            raise ValueError(f"{name!r:.80} is no object")
        if name.startswith(_OF_TENANT):
            quotas[name.removeprefix(_OF_TENANT)] = _quota(name, value)
        else:
            keys[name] = _key(name, value)
    return KeyBook(keys, quotas)


def _key(digest: str, value: Mapping[str, Any]) -> ApiKey:
    tenant, name = value.get("tenant"), value.get("name", "")
    operator, created_ms = value.get("operator", False), value.get("created_ms", 0)
    if len(digest) != hashlib.sha256().digest_size * 2 or set(digest) - set("0123456789abcdef"):
        raise ValueError(f"{digest!r:.80} is neither a SHA-256 in hex nor tenant:NAME")
    if not isinstance(tenant, str) or not TENANT.fullmatch(tenant):
        raise ValueError(f"the tenant of {digest[:_ID]} is {tenant!r:.80}, not 1 to 64 characters of [A-Za-z0-9._-]")
    if not isinstance(name, str) or not isinstance(operator, bool) or not isinstance(created_ms, int):
        raise ValueError(f"name, operator or created_ms of {digest[:_ID]} is of a wrong type")
    return ApiKey(digest, tenant, name[:MAX_NAME], operator, created_ms)


def _quota(name: str, value: Mapping[str, Any]) -> Quota:
    limits = {each: value.get(each) for each in LIMITS}
    for each, limit in limits.items():
        if limit is not None and (not isinstance(limit, int) or not 1 <= limit <= MAX_LIMIT):
            raise ValueError(f"{each} of {name!r:.80} is {limit!r:.40}, not 1 to {MAX_LIMIT}, or null for no limit")
    return Quota(**limits)
