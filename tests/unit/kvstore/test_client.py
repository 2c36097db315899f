"""What needs no server."""

from __future__ import annotations

import logging

import redis.exceptions as client_errors

from kvstore import errors
from kvstore.client import backoff_s, harm_of
from kvstore.translation import shown_url, translate


def test_urls_are_shown_without_secrets() -> None:
    shown = {
        "redis://user:pass@host:6380/2?socket_timeout=1": "redis://host:6380/2",
        "rediss://:pass@host": "rediss://host",
        "redis://[::1]:7/0": "redis://[::1]:7/0",
        "unix:///run/redis.sock?password=pass": "unix:///run/redis.sock",
    }
    assert {url: shown_url(url) for url in shown} == shown


def test_every_error_of_the_client_has_one_of_ours() -> None:
    ours: dict[type[client_errors.RedisError], type[errors.BrokerError]] = {
        client_errors.ConnectionError: errors.BrokerUnreachable,
        client_errors.TimeoutError: errors.BrokerUnreachable,
        client_errors.BusyLoadingError: errors.BrokerUnreachable,
        client_errors.ReadOnlyError: errors.BrokerUnreachable,
        client_errors.MasterDownError: errors.BrokerUnreachable,
        client_errors.AuthenticationError: errors.BrokerAuth,
        client_errors.AuthorizationError: errors.BrokerAuth,
        client_errors.NoPermissionError: errors.BrokerAuth,
        client_errors.OutOfMemoryError: errors.BrokerFull,
        client_errors.ResponseError: errors.BrokerError,
        client_errors.DataError: errors.BrokerError,
    }
    for theirs, expected in ours.items():
        translated = translate(theirs("why"), "redis://:pass@host:1/0")
        assert type(translated) is expected
        assert "redis://host:1/0" in str(translated)
        assert "why" in str(translated)


def test_pauses_grow_and_are_bounded_and_differ() -> None:
    for failures in range(1, 2000):
        assert 0 < backoff_s(failures) <= min(1.0, 0.05 * 2 ** min(failures, 10))
    assert len({backoff_s(5) for _ in range(20)}) > 1


def test_what_a_policy_of_eviction_may_do() -> None:
    assert harm_of("noeviction") is None
    for policy in ("volatile-lru", "volatile-lfu", "volatile-random", "volatile-ttl"):
        level, words = harm_of(policy) or (0, "")
        assert level == logging.WARNING
        assert policy in words
        assert "accepted jobs are safe" in words
    for policy in ("allkeys-lru", "allkeys-lfu", "allkeys-random", "something new"):
        level, words = harm_of(policy) or (0, "")
        assert level == logging.ERROR
        assert policy in words
        assert "ACCEPTED JOBS MAY BE LOST" in words
