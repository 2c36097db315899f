"""Who calls, and what they may: keys, as calls carry them, looked up in what holds now.

Nothing here knows how a call came: it looks at the call's metadata, which by HTTP are its headers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gateway.access import TENANT_HEADER
from gateway.errors import AdmissionError, Forbidden, Unauthenticated, shown
from kvstore.api_keys import KeyBook, RedisKeys
from kvstore.key_file import KeyFile
from kvstore.tenants import NO_QUOTA, NOBODY, TENANT, Quota, is_job_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.api_keys import KeyStore
    from kvstore.client import Broker

HEADER: Final = "authorization"
REDIS: Final = "redis"
"""As ``--keys``: they are in the broker."""
KEYS_S: Final = 1.0
"""How often it is looked whether keys have changed: how long a key that was revoked still works."""
HOW: Final = "send 'authorization: Bearer KEY', as metadata by gRPC, as a header by HTTP"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls."""

    tenant: str = NOBODY
    quota: Quota = NO_QUOTA
    operator: bool = True
    """It may ask what concerns the whole fleet, and go before others."""

    def check_priority(self, priority: int) -> None:
        """Refuses, with Forbidden, to let one tenant go before the others unless it may."""
        most = self.quota.max_priority or 0
        if priority > most and not self.operator:
            raise Forbidden(
                f"priority is {priority}; requests of tenant {self.tenant} may have {most} at most: "
                f"`octavo keys limit {self.tenant} --max-priority {priority}` allows it"
            )


ANYBODY: Final = Caller()
"""Every caller, where no keys are in use."""


class Doorman:
    """Knows the keys that hold now. `store`: None where no keys are in use, and everybody may do everything."""

    def __init__(self, store: KeyStore | None = None) -> None:
        self._store = store
        self._book = KeyBook()
        self._version = ""
        self.refused = 0
        """Calls that carried no key that holds."""

    async def look(self) -> None:
        """Reads the keys, if they have changed. Where they can't be read, those that were read last hold on: to answer
        nobody would be worse. Raises KeysDamaged, BrokerError, OSError."""
        found = await self._store.read(self._version) if self._store is not None else None
        if found is not None:
            self._version, self._book = found

    def caller(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Caller:
        """Who calls, or for whom an operator does, by the call's metadata. Raises Unauthenticated: there is no key in
        it, or none that holds; Forbidden, AdmissionError: it names a tenant that it may not name, or that is none."""
        pairs = tuple(metadata or ())
        tenant = tenant_named(pairs)
        if self._store is None:
            if tenant is not None:
                raise Forbidden(f"{TENANT_HEADER} is set, and no API keys are in use here, so there are no tenants")
            return ANYBODY
        try:
            key = self._book.holder(bearer_of(pairs))
            if key is None:
                raise Unauthenticated("the API key is not known: it is wrong, or was revoked")
        except Unauthenticated:
            self.refused += 1
            raise
        if tenant is None:
            return Caller(key.tenant, self._book.quota(key.tenant), key.operator)
        if not key.operator:
            raise Forbidden(f"{TENANT_HEADER} is for operators: `octavo keys add --operator` makes a key for it")
        return Caller(tenant, self._book.quota(tenant), operator=False)

    def operator(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Caller:
        """Who calls, if they may ask what concerns the whole fleet. Raises Unauthenticated, Forbidden."""
        caller = self.caller(metadata)
        if not caller.operator:
            raise Forbidden("this call is for operators: `octavo keys add --operator` makes a key for it")
        return caller


def bearer_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The key that a call carries. Raises Unauthenticated where that is none, or several."""
    values = [value for name, value in metadata if name.lower() == HEADER]
    if not values:
        raise Unauthenticated(f"an API key is needed: {HOW}")
    if len(values) > 1:
        raise Unauthenticated(f"{len(values)} authorizations came with the call: send one")
    value = values[0] if isinstance(values[0], str) else values[0].decode(errors="replace")
    scheme, _, key = value.strip().partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Unauthenticated(f"the authorization carries no API key: {HOW}")
    return key.strip()


def tenant_named(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """For whom a call says that it is; None: it does not say. Raises AdmissionError for what names no tenant."""
    values = [value for name, value in metadata if name.lower() == TENANT_HEADER]
    if not values:
        return None
    value = values[0] if isinstance(values[0], str) else values[0].decode(errors="replace")
    if len(values) > 1 or not TENANT.fullmatch(value):
        told = shown(value) if len(values) == 1 else f"there {len(values)} times"
        raise AdmissionError(TENANT_HEADER, told, "must be one name, of 1 to 64 characters of [A-Za-z0-9._-]")
    return value


def check_job_name(name: str) -> None:
    """Refuses, with AdmissionError, what names no job in the fleet: operators may name those of all tenants."""
    if not is_job_name(name):
        limit = "must be 1 to 128 characters of [A-Za-z0-9._:-], or of another tenant's job its name and a slash before"
        raise AdmissionError("request_id", shown(name), limit)


def doorman(keys: str, broker: Broker) -> Doorman:
    """For what `--keys` says: empty, `redis`, or the path of a file."""
    if not keys:
        return Doorman()
    return Doorman(RedisKeys(broker) if keys == REDIS else KeyFile(Path(keys)))
