"""Runs of `octavo bench routing` that nobody made, for tests of what is told of them."""

from __future__ import annotations

from typing import Any

from bench.routing_figures import ANSWERED, FAILED, UNANSWERED, Sample, Window, summarise
from bench.routing_load import GROUPS, HIT_FREE

GOOD = Sample(
    due_s=1.0,
    lag_s=0.002,
    prompt_tokens=100,
    outcome=ANSWERED,
    waited_s=2.0,
    worker="w0",
    cached_tokens=64,
    predicted_tokens=64,
    first_token_s=0.25,
    tokens=((0.25, 1), (0.75, 4)),
)
LOST = Sample(due_s=1.0, lag_s=0.002, prompt_tokens=100, outcome=FAILED, waited_s=2.0, error="UNAVAILABLE: gone")
GIVEN_UP = Sample(due_s=1.0, lag_s=0.0, prompt_tokens=9, outcome=UNANSWERED, waited_s=4.0)
"""Without a first token."""


def run(policy: str, ratio: float, load: float, *samples: Sample, kind: str = GROUPS) -> dict[str, Any]:
    return {
        "scenario": kind if kind != GROUPS else f"ratio {ratio:g}",
        "kind": kind,
        "ratio": ratio,
        "groups": 16,
        "load": load,
        "requests_per_s": 5.0,
        "policy": policy,
        **summarise(samples, Window(0.0, 10.0)).as_dict(),
        "sent": 8,
        "stolen": 2,
        "wall_s": 12.0,
        "client_cpu": 0.1,
    }


RUNS = [
    run("prefix", 2.0, 0.4, GOOD, GOOD),
    run("least-loaded", 2.0, 0.4, GOOD, LOST),
    run("prefix", 2.0, 3.0, GOOD),
    run("least-loaded", 2.0, 3.0),
    run("prefix", 0.0, 0.8, GOOD, kind=HIT_FREE),
]
FACTS: dict[str, Any] = {
    "command": "octavo bench routing --seconds 30",
    "machine": {
        "date": "2026-01-02T03:04:05+00:00",
        "cpu": "A CPU",
        "usable_cores": 2,
        "instruction_sets": ["avx2"],
        "memory_gib": 8.0,
        "load_average": [0.1, 0.2, 0.3],
        "system": "Linux",
        "python": "3.11",
        "packages": {"torch": "2"},
    },
    "model": {"name": "m"},
    "fleet": {
        "workers": 4,
        "kv_tokens": 4096,
        "max_running": 32,
        "device": "cpu",
        "simulated": False,
        "threads_per_worker": 1,
    },
    "config": {
        "model": "smollm2-135m",
        "prefix_tokens": 512,
        "tail_tokens": "32:96",
        "output_tokens": "8",
        "fill_s": 10.0,
        "warm_s": 4.0,
        "seconds": 30.0,
        "drain_s": 5.0,
    },
    "capacity_per_s": 5.125,
    "capacity_measured": True,
}
