"""`octavo health` against real servers in this process."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING

import grpc
import pytest
from click.testing import CliRunner, Result
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry, Gauge, start_http_server

from gateway.errors import STARTING
from ops.health import FLEET, INFERENCE, PROCESS, Checked, command

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def says(servicer: health.HealthServicer, process: int, fleet: int, inference: int) -> None:
    for name, status in ((PROCESS, process), (FLEET, fleet), (INFERENCE, inference)):
        servicer.set(name, status)


def run(*args: str) -> Result:
    return CliRunner().invoke(command, args)


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that refuses connections: bound, so that nobody takes it, but not listening."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.fixture
def gateway() -> Iterator[tuple[str, health.HealthServicer]]:
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        servicer = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}", servicer
        server.stop(None).wait()


@pytest.fixture
def metrics() -> Iterator[tuple[str, CollectorRegistry]]:
    registry = CollectorRegistry()
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    yield f"127.0.0.1:{server.server_port}", registry
    server.shutdown()
    server.server_close()
    thread.join()


def test_serving_gateway(gateway: tuple[str, health.HealthServicer]) -> None:
    target, servicer = gateway
    says(servicer, SERVING, SERVING, SERVING)
    result = run("--target", target)
    assert (result.exit_code, result.output) == (0, f"{target}: SERVING\n")


@pytest.mark.parametrize(
    ("statuses", "alive", "reason"),
    [
        ((SERVING, SERVING, NOT_SERVING), 0, f"no live worker serves; {STARTING}"),
        ((SERVING, NOT_SERVING, NOT_SERVING), 0, "the broker does not answer the gateway"),
        ((NOT_SERVING, NOT_SERVING, NOT_SERVING), 1, "the gateway is stopping"),
    ],
)
def test_what_is_missing_is_told(
    gateway: tuple[str, health.HealthServicer], statuses: tuple[int, int, int], alive: int, reason: str
) -> None:
    """Whatever it is, --alive is about the process alone."""
    target, servicer = gateway
    says(servicer, *statuses)
    result = run("--target", target)
    assert (result.exit_code, result.output) == (1, f"Error: {target}: NOT_SERVING: {reason}\n")
    told = f"Error: {target}: NOT_SERVING: {reason}\n" if alive else f"{target}: SERVING\n"
    result = run("--target", target, "--alive")
    assert (result.exit_code, result.output) == (alive, told)


def test_all_results_as_json(gateway: tuple[str, health.HealthServicer], closed_port: int) -> None:
    target, servicer = gateway
    says(servicer, SERVING, SERVING, SERVING)
    address = f"127.0.0.1:{closed_port}"
    result = run("--target", target, "--metrics", address, "--json")
    assert (result.exit_code, result.stderr) == (1, "")
    assert json.loads(result.stdout) == [
        {"address": target, "healthy": True, "status": "SERVING", "reason": ""},
        {"address": address, "healthy": False, "status": "unreachable", "reason": "[Errno 111] Connection refused"},
    ]
    result = run("--target", target, "--json")
    assert (result.exit_code, len(json.loads(result.stdout))) == (0, 1)


def test_no_gateway(closed_port: int) -> None:
    result = run("--target", f"127.0.0.1:{closed_port}")
    assert result.exit_code == 1
    assert f"127.0.0.1:{closed_port}: UNAVAILABLE: nothing answers there; is `octavo up` running" in result.output


def test_every_gateway_that_is_named_must_be_well(gateway: tuple[str, health.HealthServicer], closed_port: int) -> None:
    target, servicer = gateway
    says(servicer, SERVING, SERVING, SERVING)
    result = run("--target", f"{target}, {target}")
    assert (result.exit_code, result.output) == (0, f"{target}: SERVING\n" * 2)
    result = run("--target", f"{target},127.0.0.1:{closed_port}")
    assert (result.exit_code, result.stdout) == (1, f"{target}: SERVING\n")


def test_metrics_of_a_worker_that_loads_and_then_serves(metrics: tuple[str, CollectorRegistry]) -> None:
    address, registry = metrics
    result = run("--metrics", address)
    assert (result.exit_code, result.output) == (1, f"Error: {address}: starting\n")
    Gauge("octavo_worker_sequences", "Sequences by state", ["state"], registry=registry).labels("running").set(0)
    result = run("--metrics", address)
    assert (result.exit_code, result.output) == (0, f"{address}: OK\n")


def test_no_metrics(closed_port: int) -> None:
    result = run("--metrics", f"127.0.0.1:{closed_port}")
    assert result.exit_code == 1
    assert "Connection refused" in result.output


def test_metrics_with_another_status() -> None:
    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(503)

        def log_message(self, *args: object) -> None:
            """Keeps the test's output clean."""

    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        result = run("--metrics", f"127.0.0.1:{server.server_port}")
        thread.join()
    assert (result.exit_code, result.output) == (1, f"Error: 127.0.0.1:{server.server_port}: HTTP 503\n")


def test_both_must_be_well(gateway: tuple[str, health.HealthServicer], closed_port: int) -> None:
    target, servicer = gateway
    says(servicer, SERVING, SERVING, SERVING)
    result = run("--target", target, "--metrics", f"127.0.0.1:{closed_port}")
    assert result.exit_code == 1


def test_without_options_the_usual_gateway_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        "ops.health.check_grpc", lambda target, *_: asked.append(target) or Checked(target, True, "SERVING")
    )
    monkeypatch.delenv("OCTAVO_TARGET", raising=False)
    assert (run().exit_code, asked) == (0, ["127.0.0.1:50051"])
    monkeypatch.setenv("OCTAVO_TARGET", "there:1")
    assert (run().exit_code, asked[1:]) == (0, ["there:1"])
    assert (run("--target", "here:2").exit_code, asked[2:]) == (0, ["here:2"])


def test_a_worker_is_asked_alone(
    metrics: tuple[str, CollectorRegistry], closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a variable says which gateway the commands call."""
    address, registry = metrics
    Gauge("octavo_worker_sequences", "Sequences by state", ["state"], registry=registry).labels("running").set(0)
    monkeypatch.setenv("OCTAVO_TARGET", f"127.0.0.1:{closed_port}")
    result = run("--metrics", address)
    assert (result.exit_code, result.output) == (0, f"{address}: OK\n")
