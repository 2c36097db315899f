"""`octavo health` against real servers in this process."""

from __future__ import annotations

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

from ops.health import command

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


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
    servicer.set("", SERVING)
    result = run("--target", target)
    assert (result.exit_code, result.output) == (0, f"{target}: SERVING\n")


def test_draining_gateway(gateway: tuple[str, health.HealthServicer]) -> None:
    target, servicer = gateway
    servicer.set("", NOT_SERVING)
    result = run("--target", target)
    assert (result.exit_code, result.output) == (1, f"Error: {target}: NOT_SERVING\n")


def test_no_gateway(closed_port: int) -> None:
    result = run("--target", f"127.0.0.1:{closed_port}")
    assert result.exit_code == 1
    assert f"127.0.0.1:{closed_port}: UNAVAILABLE: nothing answers there; is `octavo up` running" in result.output


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
    servicer.set("", SERVING)
    result = run("--target", target, "--metrics", f"127.0.0.1:{closed_port}")
    assert result.exit_code == 1


def test_without_options_the_usual_gateway_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("ops.health.check_grpc", lambda target, _: asked.append(target) or "SERVING")
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
