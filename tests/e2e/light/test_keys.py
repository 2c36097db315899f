"""A fleet with keys and TLS, as the README has it: by the commands alone."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.e2e.harness import Up, octavo
from tests.support.certificates import Authority

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(120)
ASKED = ("generate", "A book is", "--max-tokens", "3")


def test_who_has_a_key_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority, keys = Authority(tmp_path), str(tmp_path / "keys.json")
    pair = authority.sign("gateway")
    made = octavo("keys", "add", "--keys", keys, "--tenant", "acme", "--requests-per-minute", "1").stdout.strip()
    for name, value in (
        ("OCTAVO_KEYS", keys),
        ("OCTAVO_TLS_CERT", str(pair.certificate)),
        ("OCTAVO_TLS_KEY", str(pair.key)),
        ("OCTAVO_TLS_CA", str(authority.certificate)),
    ):
        monkeypatch.setenv(name, value)
    up = Up.start("--model", "simulated:20000,2", "--grace", "1")
    try:
        # It sees by their health alone that its gateways serve: it has no key itself.
        to = ("--target", up.until_ready().target)
        assert octavo("health", *to).stdout == f"{up.target}: SERVING\n"
        assert "UNAUTHENTICATED: an API key is needed" in refused(*ASKED, *to)
        monkeypatch.setenv("OCTAVO_API_KEY", made)
        assert octavo(*ASKED, *to).stdout
        assert "1 are allowed" in refused(*ASKED, *to)
        assert "PERMISSION_DENIED: this call is for operators" in refused("workers", *to)
        monkeypatch.delenv("OCTAVO_TLS_CA")
        assert "it may want TLS (--tls-ca)" in refused("health", *to)
        monkeypatch.setenv("OCTAVO_TLS_CA", str(authority.certificate))
        octavo("keys", "revoke", made)
        until = time.monotonic() + 10
        while "was revoked" not in refused(*ASKED, *to):
            assert time.monotonic() < until
    finally:
        status = up.stop()
    assert status == 0, "\n".join(up.said)


def refused(*arguments: str) -> str:
    """What a command says that fails."""
    ran = octavo(*arguments, check=False)
    assert ran.returncode == 1, ran.stdout
    return ran.stderr
