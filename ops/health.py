"""``octavo health``: is a process of the fleet serving? Made for container health checks: it loads little."""

from __future__ import annotations

import http.client
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from kvstore.ranges import Finite
from ops.console import emit, emit_json
from ops.reach import reaching

if TYPE_CHECKING:
    from gateway.access import Access
    from ops.reach import Target

PROCESS, FLEET, INFERENCE = "", "octavo.v1.Fleet", "octavo.v1.Inference"
"""What a gateway's health service is asked for: each includes what stands before it."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What one process said of itself. `reason`: what is missing; empty when it is healthy."""

    address: str
    healthy: bool
    status: str
    reason: str = ""

    @property
    def line(self) -> str:
        return ": ".join(part for part in (self.address, self.status, self.reason) if part)


@click.command("health")
@reaching("HOST:PORT of a gateway, or of several, with commas between them.")
@click.option("--alive", is_flag=True, help="Ask the gateway only whether its process is alive, workers or not.")
@click.option("--metrics", default="", help="HOST:PORT of the Prometheus endpoint of a worker or gateway.")
@click.option("--timeout", type=Finite(min=0.1), default=3.0, show_default=True, help="Seconds, for each.")
@click.option("--json", "as_json", is_flag=True, help="Print what each said as JSON.")
@click.pass_context
def command(context: click.Context, target: Target, alive: bool, metrics: str, timeout: float, as_json: bool) -> None:
    """Ask whether answers can be had from a gateway, that is whether a live worker serves; ask a metrics endpoint; or
    both. Exit 0 when all are well.

    With --metrics the gateway is asked only if --target is given too.
    """
    results: list[Checked] = []
    if not metrics or context.get_parameter_source("target") is ParameterSource.COMMANDLINE:
        service = PROCESS if alive else INFERENCE
        results += [check_grpc(each, timeout, service, target.access) for each in target.addresses]
    if metrics:
        results.append(check_metrics(metrics, timeout))
    bad = [each for each in results if not each.healthy]
    if as_json:
        emit_json([asdict(each) for each in results])
        if bad:
            raise SystemExit(1)
        return
    for each in results:
        if each.healthy:
            emit(each.line)
    if bad:
        raise click.ClickException("\n".join(each.line for each in bad))


def check_grpc(target: str, timeout: float, service: str, access: Access | None = None) -> Checked:
    """What a gateway's health service says of `service`; where that is no good, what it lacks."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from gateway.errors import STARTING
    from ops.client import describe

    # A proxy in the environment is for the outside; and one try is enough, as whoever runs this asks again.
    options, credentials = [("grpc.enable_http_proxy", 0)], access.credentials if access else None
    with (
        grpc.insecure_channel(target, options=options)
        if credentials is None
        else grpc.secure_channel(target, credentials, options=options)
    ) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        def status(name: str) -> str:
            reply = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=timeout)
            return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))

        try:
            if (said := status(service)) == "SERVING":
                return Checked(target, True, said)
            # The first of these that is missing is the reason.
            for name, reason in (
                (PROCESS, "the gateway is stopping"),
                (FLEET, "the broker does not answer the gateway"),
            ):
                if name == service or status(name) != "SERVING":
                    return Checked(target, False, said, reason)
        except grpc.RpcError as error:
            return Checked(target, False, *describe(error).split(": ", 1))
    return Checked(target, False, said, f"no live worker serves; {STARTING}")


def check_metrics(address: str, timeout: float) -> Checked:
    """`OK`, or why not: an endpoint that can't be reached, or serves no metric of ours.

    A worker listens at once, but has metrics to show only when its model is loaded and it takes jobs.
    """
    connection = http.client.HTTPConnection(address, timeout=timeout)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        return Checked(address, False, "unreachable", str(error))
    finally:
        connection.close()
    if response.status != http.client.OK:
        return Checked(address, False, f"HTTP {response.status}")
    if not re.search(rb"^octavo_", body, re.MULTILINE):
        return Checked(address, False, "starting")
    return Checked(address, True, "OK")
