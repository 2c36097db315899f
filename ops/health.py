"""``octavo health``: is a process of the fleet serving? Made for container health checks: it loads little."""

from __future__ import annotations

import http.client
import re

import click
from click.core import ParameterSource

from ops.config import DEFAULT_TARGET, option


@click.command("health")
@option("--target", default=DEFAULT_TARGET, help="HOST:PORT of a gateway.")
@click.option("--metrics", default="", help="HOST:PORT of the Prometheus endpoint of a worker or gateway.")
@click.option("--timeout", type=click.FloatRange(min=0.1), default=3.0, show_default=True, help="Seconds, for each.")
@click.pass_context
def command(context: click.Context, target: str, metrics: str, timeout: float) -> None:
    """Ask a gateway's health service, a metrics endpoint, or both; exit 0 when all are well.

    With --metrics the gateway is asked only if --target is given too.
    """
    if not metrics or context.get_parameter_source("target") is ParameterSource.COMMANDLINE:
        click.echo(f"{target}: {check_grpc(target, timeout)}")
    if metrics:
        click.echo(f"{metrics}: {check_metrics(metrics, timeout)}")


def check_grpc(target: str, timeout: float) -> str:
    """`SERVING`; anything else raises ClickException."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from ops.client import describe

    # A proxy in the environment is for the outside; and one try is enough, as whoever runs this asks again.
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.RpcError as error:
            raise click.ClickException(f"{target}: {describe(error)}") from error
    status: str = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
    if reply.status != health_pb2.HealthCheckResponse.SERVING:
        raise click.ClickException(f"{target}: {status}")
    return status


def check_metrics(address: str, timeout: float) -> str:
    """`OK`; an endpoint that can't be reached, or serves no metric of ours, raises ClickException.

    A worker listens at once, but has metrics to show only when its model is loaded and it takes jobs.
    """
    connection = http.client.HTTPConnection(address, timeout=timeout)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise click.ClickException(f"{address}: {error}") from error
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise click.ClickException(f"{address}: HTTP {response.status}")
    if not re.search(rb"^octavo_", body, re.MULTILINE):
        raise click.ClickException(f"{address}: starting")
    return "OK"
