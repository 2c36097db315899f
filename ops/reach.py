"""Which gateways a command calls, and how it reaches them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ops.config import DEFAULT_TARGET, option

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.access import Access

SYSTEM: Final = "system"
"""As --tls-ca: certificates that this machine trusts anyway."""
CERTIFICATE: Final = "PEM file of a certificate of one's own, for gateways that want one."


@dataclass(frozen=True, slots=True)
class Target:
    """Gateways, and how they are reached."""

    text: str = DEFAULT_TARGET
    """HOST:PORT of one, or of several with commas between."""
    access: Access | None = None
    """None: in plaintext, without a key."""

    @property
    def addresses(self) -> list[str]:
        """HOST:PORT of each. What names none is one, which nobody will find."""
        return [each for part in self.text.split(",") if (each := part.strip())] or [self.text]


DEFAULT: Final = Target()


def reaching(
    told: str = "HOST:PORT of a gateway; of several, with commas: the first that answers.",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options of a command that calls gateways, which gets them as one `target`. `told`: --help for --target."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @access_options()
        @wraps(function)
        def command(*arguments: Any, target: str, access: Access, **values: Any) -> Any:
            return function(*arguments, target=Target(target, access), **values)

        return option("--target", default=DEFAULT_TARGET, help=told)(command)

    return decorate


def access_options(
    certificate: str = "--tls-cert", key: str = "--tls-key"
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options that say how gateways are reached, for a command that gets them as `access`. The client's own
    certificate has other variables than a gateway's: both may be in one environment."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def command(*arguments: Any, **values: Any) -> Any:
            told = {name: values.pop(name) for name in ("tls_ca", "client_cert", "client_key", "api_key")}
            return function(*arguments, access=access_of(**told), **values)

        own: dict[str, Any] = {"default": "", "show_envvar": True}
        told = f"PEM file of who signed the gateways' certificates, or {SYSTEM!r}: TLS. Default: plaintext."
        for add in (
            option("--api-key", default="", help="For gateways that want one; others may see options, not variables."),
            click.option(key, "client_key", envvar="OCTAVO_CLIENT_KEY", help="Its private key, a PEM file.", **own),
            click.option(certificate, "client_cert", envvar="OCTAVO_CLIENT_CERT", help=CERTIFICATE, **own),
            option("--tls-ca", default="", help=told),
        ):
            command = add(command)
        return command

    return decorate


def access_of(tls_ca: str, client_cert: str, client_key: str, api_key: str) -> Access:
    """Raises click.UsageError for what does not go together, or can't be read."""
    if bool(client_cert) != bool(client_key):
        raise click.UsageError("a client's certificate and its key go together")
    if client_cert and not tls_ca:
        raise click.UsageError(f"a client's certificate is for TLS: give --tls-ca as well, a file or {SYSTEM!r}")
    if not api_key.isascii() or not api_key.isprintable():
        raise click.UsageError("the API key has characters that no key has")
    from gateway.access import Access  # here: nothing of a gateway is loaded for --help

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
        raise click.UsageError(f"{path} can't be read: {error.strerror or error}") from error
