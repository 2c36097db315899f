"""What a gateway listens with, and what it refuses to be open to."""

from __future__ import annotations

import re
import ssl
from typing import TYPE_CHECKING, Any

import pytest

from gateway.config import GatewayConfig, TransportError
from gateway.transport import (
    Certificates,
    Pem,
    for_grpc,
    for_http,
    http_context,
    is_loopback,
    require_guarded,
    server_credentials,
)
from tests.support.certificates import Authority

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TLS = {"tls_cert": "c", "tls_key": "k"}


def config(host: str = "0.0.0.0", **settings: Any) -> GatewayConfig:
    return GatewayConfig("redis://x", host=host, **settings)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_nothing(host: str) -> None:
    assert is_loopback(host)
    require_guarded(config(host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", ""])
def test_all_else_needs_tls_and_a_way_to_tell_callers_apart(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(TransportError):
        require_guarded(config(host))
    require_guarded(config(host, keys="k", **TLS))
    require_guarded(config(host, tls_client_ca="a", **TLS))
    require_guarded(config(host, insecure=True))


@pytest.mark.parametrize(
    ("settings", "lacking"),
    [
        (
            {},
            "no TLS (--tls-cert, --tls-key) and no API keys (--keys) or clients' certificates (--tls-client-ca); "
            "give these, or --insecure where the network itself keeps others out",
        ),
        ({"keys": "k"}, "there is no TLS (--tls-cert, --tls-key); give"),
        (TLS, "there is no API keys (--keys) or clients' certificates (--tls-client-ca); give"),
    ],
)
def test_what_is_lacking_is_told(settings: dict[str, str], lacking: str) -> None:
    with pytest.raises(TransportError, match=re.escape(lacking)) as caught:
        require_guarded(config(**settings))
    assert str(caught.value).startswith("--host 0.0.0.0 can be reached from other machines")


def test_plaintext_unless_there_is_a_certificate(tmp_path: Path) -> None:
    assert server_credentials(config()) is http_context(config()) is None
    authority = Authority(tmp_path)
    pair = authority.sign("server")
    files = {"tls_cert": str(pair.certificate), "tls_key": str(pair.key)}
    assert server_credentials(config(**files)) is not None
    assert server_credentials(config(**files, tls_client_ca=str(authority.certificate))) is not None
    for settings, mode in ((files, ssl.CERT_NONE), ({**files, "tls_client_ca": files["tls_cert"]}, ssl.CERT_REQUIRED)):
        context = http_context(config(**settings))
        assert context is not None
        assert context.verify_mode is mode


def test_files_that_do_not_fit_are_told(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    one, two = authority.sign("one"), authority.sign("two")
    cert, key, other = str(one.certificate), str(one.key), str(two.key)
    for settings, told in (
        ({"tls_cert": cert}, "--tls-cert and --tls-key go together"),
        ({"tls_client_ca": cert}, "--tls-cert and --tls-key go together"),
        (
            {"tls_cert": cert, "tls_key": other},
            f"--tls-cert {cert} and --tls-key {other} are no certificate and its key",
        ),
        ({"tls_cert": cert, "tls_key": "/none"}, "/none can't be read: No such file or directory"),
        ({"tls_cert": cert, "tls_key": key, "tls_client_ca": key}, f"--tls-client-ca {key} has no certificates"),
        (
            {"tls_cert": cert, "tls_key": key, "tls_client_ca": "/none"},
            "/none can't be read: No such file or directory",
        ),
    ):
        for make in (server_credentials, http_context):
            with pytest.raises(TransportError, match=re.escape(told)):
                make(config(**settings))


@pytest.mark.parametrize("make", [for_grpc, for_http])
def test_renewed_certificates_hold_for_who_comes_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Pem], Any]
) -> None:
    authority = Authority(tmp_path)
    pair, new = authority.sign("server"), authority.sign("new")
    files = Certificates(Pem(str(pair.certificate), str(pair.key), str(authority.certificate)), make)
    files.read()
    assert files.renewed() is None
    new.certificate.rename(pair.certificate)  # its key is still to come
    assert files.renewed() is files.renewed() is None
    assert "reading renewed certificates; the last ones hold on fails" in caplog.text
    new.key.rename(pair.key)
    assert files.renewed() is not None
    assert files.renewed() is None
    pair.key.unlink()
    assert files.renewed() is None
