"""How a gateway is listened to: TLS, and what it refuses to be open to."""

from __future__ import annotations

import ipaddress
import logging
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import grpc

from gateway.config import TransportError
from kvstore.outage import Outage

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.config import GatewayConfig

T = TypeVar("T")
logger = logging.getLogger(__name__)


def require_guarded(config: GatewayConfig) -> None:
    """Raises TransportError for a gateway that anybody in the network could use or listen in on, unless it was said to
    be meant so."""
    if config.insecure or is_loopback(config.host):
        return
    lacking = []
    if not config.tls_cert:
        lacking.append("TLS (--tls-cert, --tls-key)")
    if not config.keys and not config.tls_client_ca:
        lacking.append("API keys (--keys) or clients' certificates (--tls-client-ca)")
    if lacking:
        what = f"--host {config.host} can be reached from other machines, and there is no {' and no '.join(lacking)}"
        raise TransportError(f"{what}; give these, or --insecure where the network itself keeps others out")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it. What has no address is left to whoever listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(host or None, 0, flags=socket.AI_PASSIVE)}
    except OSError:
        return True
    return all(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in found)


def server_credentials(config: GatewayConfig) -> grpc.ServerCredentials | None:
    """What gRPC listens with; None: plaintext. Raises TransportError for files that are not there, or not what they
    should be."""
    if (files := Pem.of(config)) is None:
        return None
    certificates = Certificates(files, for_grpc)
    # The stubs do not know that there may be nothing new.
    renewed: Callable[[], Any] = certificates.renewed
    first, required = certificates.read(), bool(files.client_ca)
    return grpc.dynamic_ssl_server_credentials(first, renewed, require_client_authentication=required)


def http_context(config: GatewayConfig) -> ssl.SSLContext | None:
    """What HTTP listens with; None: plaintext. Raises as ``server_credentials``."""
    if (files := Pem.of(config)) is None:
        return None
    certificates = Certificates(files, for_http)
    newest = context = certificates.read()

    def choose(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        nonlocal newest
        newest = certificates.renewed() or newest
        connection.context = newest

    # Called for each connection, whether or not it names a server.
    context.sni_callback = choose
    return context


@dataclass(frozen=True, slots=True)
class Pem:
    """Paths of the files that a gateway listens with. ``client_ca``: empty where clients need no certificates."""

    cert: str
    key: str
    client_ca: str

    @classmethod
    def of(cls, config: GatewayConfig) -> Pem | None:
        """None: plaintext. Raises TransportError for files that lack others."""
        files = cls(config.tls_cert, config.tls_key, config.tls_client_ca)
        if not (files.cert or files.key or files.client_ca):
            return None
        if not (files.cert and files.key):
            raise TransportError("--tls-cert and --tls-key go together, and --tls-client-ca goes with both")
        return files


class Certificates(Generic[T]):
    """Files that a gateway listens with. What takes their place holds for connections that come then: certificates are
    renewed without a restart."""

    def __init__(self, files: Pem, make: Callable[[Pem], T]) -> None:
        self._files = files
        self._make = make
        self._seen: list[tuple[int, int]] = []
        self._outage = Outage(logger, "reading renewed certificates; the last ones hold on")

    def read(self) -> T:
        """Raises TransportError."""
        try:
            self._seen = self._look()
            return self._make(self._files)
        except OSError as error:
            raise TransportError(f"{error.filename} can't be read: {error.strerror}") from error

    def renewed(self) -> T | None:
        """For each connection that comes (by gRPC in a thread of its own): what is new; None: nothing, or nothing that
        would do."""
        try:
            if self._look() == self._seen:
                return None
            found = self.read()
        except (OSError, TransportError) as error:
            self._seen = []  # they are written one after the other: the next look may find them whole
            self._outage.failed(error)
            return None
        self._outage.worked()
        return found

    def _look(self) -> list[tuple[int, int]]:
        paths = (Path(each) for each in (self._files.cert, self._files.key, self._files.client_ca) if each)
        return [(found.st_ino, found.st_mtime_ns) for found in (path.stat() for path in paths)]


def for_grpc(files: Pem) -> grpc.ServerCertificateConfiguration:
    """Raises OSError, TransportError."""
    roots = Path(files.client_ca).read_bytes() if files.client_ca else None
    pair = (Path(files.key).read_bytes(), Path(files.cert).read_bytes())
    for_http(files)  # gRPC itself only fails later, when it listens, and does not say why
    return grpc.ssl_server_certificate_configuration([pair], roots)


def for_http(files: Pem) -> ssl.SSLContext:
    """Raises OSError, TransportError."""
    cert, key, client_ca = files.cert, files.key, files.client_ca
    for path in (cert, key, client_ca):
        if path:
            Path(path).open("rb").close()  # the library's errors do not name the file
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        # The password: else a key that has one would be asked for on the terminal.
        context.load_cert_chain(cert, key, password=lambda: b"")
    except ssl.SSLError as error:
        what = f"--tls-cert {cert} and --tls-key {key} are no certificate and its key"
        raise TransportError(f"{what}: {error}") from error
    if client_ca:
        context.verify_mode = ssl.CERT_REQUIRED
        # Who comes back with a session is asked for no certificate, and would outlive the authority that let it in. So
        # there are none; those of TLS 1.2 can't be turned off here.
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
        try:
            context.load_verify_locations(client_ca)
        except ssl.SSLError as error:
            raise TransportError(f"--tls-client-ca {client_ca} has no certificates: {error}") from error
    return context
