"""How commands reach gateways."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import pytest
from click.testing import CliRunner

from gateway.access import OPEN, Access
from ops.reach import Target, access_of, access_options, reaching

if TYPE_CHECKING:
    from pathlib import Path


def asked(*arguments: str, **environment: str) -> Target:
    """What a command gets."""
    got: list[Target] = []

    @click.command()
    @reaching()
    def command(target: Target) -> None:
        got.append(target)

    result = CliRunner().invoke(command, arguments, env=environment, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return got[0]


def test_plaintext_without_a_key_by_default() -> None:
    assert asked() == Target("127.0.0.1:50051", OPEN)
    assert (OPEN.credentials, OPEN.metadata) == (None, ())


def test_options_and_variables(tmp_path: Path) -> None:
    for name in ("ca", "cert", "key"):
        (tmp_path / name).write_text(name)
    whole = Access(tls=True, ca=b"ca", certificate=b"cert", private_key=b"key", api_key="k1")
    files = [str(tmp_path / name) for name in ("ca", "cert", "key")]
    options = ("--tls-ca", files[0], "--tls-cert", files[1], "--tls-key", files[2], "--api-key", "k1")
    assert asked("--target", "a:1,b:2", *options) == Target("a:1,b:2", whole)
    variables = dict(zip(("OCTAVO_TLS_CA", "OCTAVO_CLIENT_CERT", "OCTAVO_CLIENT_KEY"), files, strict=True))
    assert asked(**variables, OCTAVO_API_KEY="k1", OCTAVO_TARGET="a:1").access == whole
    assert asked("--tls-ca", "system").access == Access(tls=True)
    # A gateway's own certificate, in the same environment, is none of a client's.
    assert asked(OCTAVO_TLS_CERT=files[1], OCTAVO_TLS_KEY=files[2]).access == OPEN


def test_secrets_are_not_shown() -> None:
    assert "k1" not in repr(Access(api_key="k1", private_key=b"k1"))
    assert Access(api_key="k1").metadata == (("authorization", "Bearer k1"),)
    assert Access(api_key="k1", tenant="acme").metadata == (("authorization", "Bearer k1"), ("octavo-tenant", "acme"))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("", "c", "", ""), "go together"),
        (("", "", "k", ""), "go together"),
        (("", "c", "k", ""), "a client's certificate is for TLS: give --tls-ca as well"),
        (("/none/ca", "", "", ""), "/none/ca can't be read: No such file or directory"),
        (("", "", "", "k\n"), "the API key has characters that no key has"),
        (("", "", "", "é"), "the API key has characters that no key has"),
    ],
)
def test_what_does_not_go_together(options: tuple[str, str, str, str], told: str) -> None:
    with pytest.raises(click.UsageError, match=told):
        access_of(*options)


def test_a_fleets_own_look_has_names_of_its_own() -> None:
    """There --tls-cert could be taken for the gateways'."""

    @click.command()
    @access_options("--client-cert", "--client-key")
    def command(access: Access) -> None:
        pass

    assert {name for each in command.params for name in each.opts} == {
        *("--tls-ca", "--client-cert", "--client-key", "--api-key"),
    }
