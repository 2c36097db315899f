"""Which gateways a command calls, and how it reaches them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

import click

from ops.config import DEFAULT_TARGET, option

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.access import Access

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
        told = "PEM file of who signed the gateways' certificates, or 'system': TLS. Default: plaintext."
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
    from gateway.access import AccessError, read_access  # here: nothing of a gateway is loaded for --help

    try:
        return read_access(tls_ca, client_cert, client_key, api_key)
    except AccessError as error:
        raise click.UsageError(str(error)) from error
