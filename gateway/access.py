"""How a client reaches gateways: in plaintext or by TLS, and with which API key."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    import grpc
    import grpc.aio

KEY_HEADER: Final = "authorization"
TENANT_HEADER: Final = "octavo-tenant"
"""Names the tenant for whom an operator asks: what comes of the call is that tenant's, and so are its limits."""
SYSTEM: Final = "system"
"""In the place of a file: certificates that this machine trusts anyway."""


class AccessError(ValueError):
    """What is said of how gateways are reached does not go together, or can't be read."""


@dataclass(frozen=True, slots=True)
class Access:
    """Certificates are PEM. By default: plaintext, and no key."""

    tls: bool = False
    ca: bytes | None = None
    """Who may have signed the gateways' certificates; None: whom the library trusts."""
    certificate: bytes | None = None
    """The client's own, for gateways that ask for one, with its ``private_key``."""
    private_key: bytes | None = field(default=None, repr=False)
    api_key: str = field(default="", repr=False)
    tenant: str = ""
    """For whom an operator's calls are; empty: for the key's own tenant."""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries."""
        key = ((KEY_HEADER, f"Bearer {self.api_key}"),) if self.api_key else ()
        return (*key, (TENANT_HEADER, self.tenant)) if self.tenant else key

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """None: plaintext."""
        if not self.tls:
            return None
        import grpc  # here, because who only says how to call need not wait for it

        return grpc.ssl_channel_credentials(self.ca, self.private_key, self.certificate)


OPEN: Final = Access()


def open_channel(target: str, access: Access, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
    """A channel for stubs; calls by ``keyed`` ones carry the API key."""
    import grpc.aio

    credentials = access.credentials
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, credentials, options=options)


class Keyed:
    """A channel as stubs see it, whose calls carry metadata. (The library has interceptors for that; they wrap every
    call in tasks of their own.)"""

    def __init__(self, channel: Any, metadata: Sequence[tuple[str, str]]) -> None:
        self._channel = channel
        self._metadata = metadata

    def unary_unary(self, *method: Any, **how: Any) -> Any:
        """As the channel's own, for a method."""
        return partial(self._channel.unary_unary(*method, **how), metadata=self._metadata)

    def unary_stream(self, *method: Any, **how: Any) -> Any:
        """As the channel's own, for a method."""
        return partial(self._channel.unary_stream(*method, **how), metadata=self._metadata)


def keyed(channel: Any, access: Access) -> Any:
    """The channel for stubs whose calls carry the API key, if there is one, and what else is to be said."""
    return Keyed(channel, access.metadata) if access.metadata else channel


def read_access(tls_ca: str, client_cert: str, client_key: str, api_key: str) -> Access:
    """From the paths of PEM files, and a key; empty: none. Raises AccessError."""
    if bool(client_cert) != bool(client_key):
        raise AccessError("a client's certificate and its key go together")
    if client_cert and not tls_ca:
        raise AccessError(f"a client's certificate is for TLS: give --tls-ca as well, a file or {SYSTEM!r}")
    if not api_key.isascii() or not api_key.isprintable():
        raise AccessError("the API key has characters that no key has")
    return Access(
        tls=bool(tls_ca),
        ca=_read(tls_ca) if tls_ca != SYSTEM else None,
        certificate=_read(client_cert),
        private_key=_read(client_key),
        api_key=api_key,
    )


def _read(path: str) -> bytes | None:
    try:
        return Path(path).read_bytes() if path else None
    except OSError as error:
        raise AccessError(f"{path} can't be read: {error.strerror or error}") from error
