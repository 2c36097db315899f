"""Sums of seconds, and how they are shown."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from kvstore.parts import Parts, PartsCollector, Spent


def test_parts_are_summed_and_those_that_are_named_are_told_before_they_are_done() -> None:
    parts = Parts("check")
    assert parts.read() == {"check": Spent(0, 0.0)}
    parts.add("submit", 0.5)
    parts.add("submit", 0.25)
    assert parts.read() == {"check": Spent(0, 0.0), "submit": Spent(2, 0.75)}


def test_a_reading_does_not_change() -> None:
    parts = Parts()
    parts.add("submit", 0.5)
    read = parts.read()
    parts.add("submit", 0.5)
    assert read == {"submit": Spent(1, 0.5)}


def test_they_are_one_summary() -> None:
    registry, parts = CollectorRegistry(), Parts("check")
    registry.register(PartsCollector("octavo_part_seconds", "Parts.", "part", parts))
    parts.add("send", 0.5)
    parts.add("send", 1.0)
    lines = generate_latest(registry).decode().splitlines()
    assert lines == [
        "# HELP octavo_part_seconds Parts.",
        "# TYPE octavo_part_seconds summary",
        'octavo_part_seconds_count{part="check"} 0.0',
        'octavo_part_seconds_sum{part="check"} 0.0',
        'octavo_part_seconds_count{part="send"} 2.0',
        'octavo_part_seconds_sum{part="send"} 1.5',
    ]
