"""Who calls, by what the call carries."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import grpc
import pytest

from gateway.access import TENANT_HEADER
from gateway.auth import ANYBODY, Caller, Doorman, bearer_of
from gateway.errors import AdmissionError, Forbidden, Unauthenticated, lookup
from kvstore.api_keys import ApiKey, digest_of, entry_of, limits_of
from kvstore.errors import KeysDamaged, OverQuota
from kvstore.key_file import KeyFile
from kvstore.tenants import Quota

if TYPE_CHECKING:
    from pathlib import Path


def carrying(key: str) -> tuple[tuple[str, str], ...]:
    return (("user-agent", "test"), ("authorization", f"Bearer {key}"))


@pytest.mark.parametrize("value", ["Bearer k1", "bearer k1", "BEARER  k1 ", b"Bearer k1"])
def test_the_key_of_a_call(value: str | bytes) -> None:
    assert bearer_of([("Authorization", value)]) == "k1"


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([], "an API key is needed: send 'authorization: Bearer KEY', as metadata by gRPC, as a header by HTTP"),
        (["k1"], "the authorization carries no API key"),
        (["Basic k1"], "the authorization carries no API key"),
        (["Bearer "], "the authorization carries no API key"),
        (["Bearer k1", "Bearer k2"], "2 authorizations came with the call"),
    ],
)
def test_a_call_without_a_key(values: list[str], told: str) -> None:
    with pytest.raises(Unauthenticated, match=f"^{re.escape(told)}"):
        bearer_of([("authorization", value) for value in values])


async def test_where_no_keys_are_in_use_everybody_may_do_everything() -> None:
    doorman = Doorman()
    await doorman.look()
    assert doorman.caller(()) is doorman.caller(carrying("k1")) is doorman.caller(None) is ANYBODY
    assert Caller("", Quota(), operator=True) == ANYBODY
    assert doorman.operator(()) is ANYBODY
    assert doorman.refused == 0


def test_who_may_go_before_others() -> None:
    plain, urgent = Caller("acme", Quota(), operator=False), Caller("acme", Quota(max_priority=5), operator=False)
    boss = Caller("house", Quota(), operator=True)
    for caller, highest in ((plain, 0), (urgent, 5), (boss, 100), (ANYBODY, 100)):
        caller.check_priority(-100)
        caller.check_priority(highest)
    told = (
        "priority is 1; requests of tenant acme may have 0 at most: `octavo keys limit acme --max-priority 1` allows it"
    )
    with pytest.raises(Forbidden, match=f"^{re.escape(told)}$"):
        plain.check_priority(1)
    with pytest.raises(Forbidden, match=r"^priority is 6; requests of tenant acme may have 5 at most"):
        urgent.check_priority(6)


async def test_what_changes_holds_with_the_next_look(tmp_path: Path) -> None:
    store = KeyFile(tmp_path / "keys")
    key, boss = ApiKey(digest_of("k1"), "acme"), ApiKey(digest_of("k2"), "house", operator=True)
    await store.put(entry_of(key) | entry_of(boss))
    doorman = Doorman(store)
    await doorman.look()
    assert doorman.caller(carrying("k1")) == Caller("acme", Quota(), operator=False)
    assert doorman.caller(carrying("k2")) == Caller("house", Quota(), operator=True)
    for unknown in ("k3", "k", ""):
        with pytest.raises(Unauthenticated):
            doorman.caller(carrying(unknown))
    assert doorman.refused == 3
    assert doorman.operator(carrying("k2")).tenant == "house"
    with pytest.raises(Forbidden, match="this call is for operators"):
        doorman.operator(carrying("k1"))
    await store.put({key.digest: None, **limits_of("house", Quota(concurrency=1))})
    await doorman.look()
    with pytest.raises(Unauthenticated, match=r"^the API key is not known: it is wrong, or was revoked$"):
        doorman.caller(carrying("k1"))
    assert doorman.caller(carrying("k2")).quota == Quota(concurrency=1)


async def test_an_operator_asks_for_a_tenant_and_nobody_else_does(tmp_path: Path) -> None:
    store = KeyFile(tmp_path / "keys")
    await store.put(
        entry_of(ApiKey(digest_of("k1"), "acme")) | entry_of(ApiKey(digest_of("k2"), "house", operator=True))
    )
    await store.put(limits_of("acme", Quota(concurrency=2)))
    doorman = Doorman(store)
    await doorman.look()
    for_acme = (*carrying("k2"), ("Octavo-Tenant", "acme"))
    assert doorman.caller(for_acme) == Caller("acme", Quota(concurrency=2), operator=False)
    # Who asks for a tenant may no more than that one.
    with pytest.raises(Forbidden, match="this call is for operators"):
        doorman.operator(for_acme)
    assert doorman.caller((*carrying("k2"), (TENANT_HEADER, b"new"))) == Caller("new", Quota(), operator=False)
    for tenant in ("acme", "house"):
        with pytest.raises(Forbidden, match=r"^octavo-tenant is for operators"):
            doorman.caller((*carrying("k1"), (TENANT_HEADER, tenant)))
    with pytest.raises(Unauthenticated):
        doorman.caller(((TENANT_HEADER, "acme"),))


@pytest.mark.parametrize("values", [[""], ["a/b"], ["x" * 65], ["a", "a"], [b"\xff"]])
async def test_what_names_no_tenant(values: list[str | bytes]) -> None:
    with pytest.raises(AdmissionError, match="must be one name, of 1 to 64 characters") as refused:
        Doorman().caller([(TENANT_HEADER, value) for value in values])
    assert refused.value.field == TENANT_HEADER


async def test_where_no_keys_are_in_use_there_are_no_tenants() -> None:
    with pytest.raises(Forbidden, match=r"^octavo-tenant is set, and no API keys are in use here"):
        Doorman().caller([(TENANT_HEADER, "acme")])


async def test_keys_that_can_not_be_read_hold_on(tmp_path: Path) -> None:
    store = KeyFile(tmp_path / "keys")
    await store.put(entry_of(ApiKey(digest_of("k1"), "acme")))
    doorman = Doorman(store)
    await doorman.look()
    (tmp_path / "keys").write_text("{")
    with pytest.raises(KeysDamaged):
        await doorman.look()
    assert doorman.caller(carrying("k1")).tenant == "acme"


@pytest.mark.parametrize(
    ("error", "code", "retry_after_ms"),
    [
        (Unauthenticated("x"), grpc.StatusCode.UNAUTHENTICATED, None),
        (Forbidden("x"), grpc.StatusCode.PERMISSION_DENIED, None),
        (OverQuota("requests", 4, 3, 250), grpc.StatusCode.RESOURCE_EXHAUSTED, 250),
        (OverQuota("jobs", 4, 3, 0), grpc.StatusCode.RESOURCE_EXHAUSTED, 1000),
        (OverQuota("tokens", 40, 30, None), grpc.StatusCode.RESOURCE_EXHAUSTED, None),
    ],
)
def test_what_a_refused_caller_is_told(error: Exception, code: grpc.StatusCode, retry_after_ms: int | None) -> None:
    status = lookup(error)
    assert status is not None
    assert (status.code, status.retry_after_ms) == (code, retry_after_ms)
