"""`octavo keys`: API keys, where gateways read them, and what their tenants may ask for."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from kvstore.api_keys import (
    LIMITS,
    MAX_LIMIT,
    MAX_NAME,
    ApiKey,
    KeyBook,
    RedisKeys,
    digest_of,
    entry_of,
    limits_of,
    new_key,
)
from kvstore.client import BrokerConfig, connect
from kvstore.errors import KvError, NoKeyFile
from kvstore.key_file import KeyFile
from kvstore.limits import MAX_PRIORITY
from kvstore.tenants import TENANT, Quota
from ops.config import option
from ops.console import emit, emit_json, note
from ops.dead import moment
from ops.show import print_table

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from kvstore.api_keys import KeyStore

    Changes = Mapping[str, Mapping[str, Any] | None]

T = TypeVar("T")
REDIS: Final = "redis"
COLUMNS: Final = ("id", "tenant", "name", "operator", "made", "requests/min", "tokens/min", "at once", "priority")
LIMIT: Final = click.IntRange(0, MAX_LIMIT)


@click.group("keys")
def command() -> None:
    """Make, show or revoke API keys, and limit their tenants.

    Gateways that were started with the same --keys see changes within a second or two.
    """


def keeping(function: Callable[..., Any]) -> Callable[..., Any]:
    """Where the keys are: the command gets a function that asks there."""

    @wraps(function)
    def command(keys: str, redis: str, namespace: str, **values: Any) -> Any:
        def ask(question: Callable[[KeyStore], Awaitable[T]]) -> T:
            try:
                return asyncio.run(asked(question, keys, redis, namespace))
            except (KvError, OSError) as error:
                raise click.ClickException(str(error)) from error

        return function(ask, **values)

    for decorate in (
        option("--namespace", default="default", help="With --keys redis: the fleet's name within it."),
        option("--redis", default="redis://127.0.0.1:6379/0", help="With --keys redis: its URL."),
        option("--keys", required=True, help="Where they are, as gateways are told it: a file, or redis."),
    ):
        command = decorate(command)
    return command


async def asked(question: Callable[[KeyStore], Awaitable[T]], keys: str, redis: str, namespace: str) -> T:
    """Raises KvError, OSError."""
    if keys != REDIS:
        return await question(KeyFile(Path(keys)))
    broker = await connect(BrokerConfig(redis, namespace))
    try:
        return await question(RedisKeys(broker))
    finally:
        await broker.close()


def limiting(function: Callable[..., Any]) -> Callable[..., Any]:
    """The limits of a tenant. None: as it was; 0: none, or of priorities the least limit."""
    for name, told in (
        ("--concurrency", "Requests of the tenant that may be unfinished."),
        ("--tokens-per-minute", "Tokens of prompts and answers that it may ask for."),
        ("--requests-per-minute", "Requests that it may send."),
    ):
        function = click.option(name, type=LIMIT, metavar="N", help=f"{told} 0: any number. Default: as it was.")(
            function
        )
    told = "Highest priority that its requests may have; at first 0. Default: as it was."
    return click.option("--max-priority", type=click.IntRange(0, MAX_PRIORITY), metavar="N", help=told)(function)


@command.command("add")
@click.option("--tenant", required=True, help="Whose it is: 1 to 64 characters of [A-Za-z0-9._-].")
@click.option("--name", default="", help="What it is for, for people.")
@click.option("--operator", is_flag=True, help="It may also ask what concerns the whole fleet.")
@limiting
@keeping
def add(ask: Callable[..., Any], tenant: str, name: str, operator: bool, **limits: int | None) -> None:
    """Make a key, and print it: it can't be shown again.

    Limits are the tenant's: they hold for all its keys together, at all gateways together.
    """
    require_tenant(tenant)
    if len(name) > MAX_NAME:
        raise click.UsageError(f"--name has {len(name)} characters, of {MAX_NAME} at most")
    secret = new_key()
    key = ApiKey(digest_of(secret), tenant, name, operator, time.time_ns() // 1_000_000)

    def made(book: KeyBook) -> Changes:
        return {**entry_of(key), **limits_of(tenant, limited(book.quota(tenant), limits))}

    ask(lambda store: changed(store, made, first=True))
    note(f"key {key.id} of tenant {tenant}; it is not kept, and can't be shown again:")
    emit(secret)


@command.command("limit")
@click.argument("tenant")
@limiting
@keeping
def limit(ask: Callable[..., Any], tenant: str, **limits: int | None) -> None:
    """Change what a tenant may ask for."""
    require_tenant(tenant)

    def made(book: KeyBook) -> Changes:
        return limits_of(tenant, limited(book.quota(tenant), limits))

    book: KeyBook = ask(lambda store: changed(store, made))
    note(f"{tenant}: {in_words(limited(book.quota(tenant), limits))}")


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@keeping
def show(ask: Callable[..., Any], as_json: bool) -> None:
    """List the keys that hold, by tenant, with their tenants' limits."""
    _, book = ask(book_in)
    keys = sorted(book.keys.values(), key=lambda key: (key.tenant, key.created_ms))
    if as_json:
        emit_json([{"id": key.id, **entry_of(key)[key.digest], **asdict(book.quota(key.tenant))} for key in keys])
    else:
        print_table(COLUMNS, [cells(key, book.quota(key.tenant)) for key in keys], none="There are no keys.")


@command.command("revoke")
@click.argument("key_id", metavar="ID")
@keeping
def revoke(ask: Callable[..., Any], key_id: str) -> None:
    """Take a key back: ID as `octavo keys list` shows it, or the key itself. Gateways refuse it within a second or two.

    Requests that came with it go on to their end.
    """

    async def drop(store: KeyStore) -> ApiKey:
        _, book = await book_in(store)
        found = [key for key in book.keys.values() if key_id in (key.id, key.digest)]
        found = found or [key for key in (book.holder(key_id),) if key is not None]
        if not found:
            raise click.ClickException("there is no such key; `octavo keys list` lists them")
        await store.put(dict.fromkeys(key.digest for key in found))
        return found[0]

    key = ask(drop)
    note(f"revoked key {key.id} of tenant {key.tenant}")


def require_tenant(tenant: str) -> None:
    """Raises click.UsageError for what names none."""
    if not TENANT.fullmatch(tenant):
        raise click.UsageError(f"tenant {tenant!r:.80} is not 1 to 64 characters of [A-Za-z0-9._-]")


async def book_in(store: KeyStore) -> tuple[str, KeyBook]:
    """All that holds, under its version."""
    return await store.read("") or ("", KeyBook())


async def changed(store: KeyStore, make: Callable[[KeyBook], Changes], *, first: bool = False) -> KeyBook:
    """Makes changes that follow from what holds, of which nobody else's is undone; what held. `first`: there need be
    nothing yet."""
    while True:
        try:
            version, book = await book_in(store)
        except NoKeyFile:
            if not first:
                raise
            version, book = "", KeyBook()
        if await store.put(make(book), version):
            return book


def limited(quota: Quota, limits: dict[str, int | None]) -> Quota:
    """A quota with what was said of it changed."""
    return replace(quota, **{name: limits[name] or None for name in LIMITS if limits[name] is not None})


def in_words(quota: Quota) -> str:
    """`60 requests per minute, 8 concurrency`; or that there is no limit."""
    told = [f"{each.replace('_', ' ')} {value}" for each, value in asdict(quota).items() if value is not None]
    return ", ".join(told) or "no limits"


def cells(key: ApiKey, quota: Quota) -> tuple[Any, ...]:
    """A key's line."""
    made, limits = moment(key.created_ms), ("-" if value is None else value for value in asdict(quota).values())
    return (key.id, key.tenant, key.name or "-", "yes" if key.operator else "-", made, *limits)
