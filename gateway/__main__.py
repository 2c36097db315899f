"""`octavo gateway`: one gateway process."""

from __future__ import annotations

import asyncio
import json
import signal
from dataclasses import asdict

import click

from gateway.config import GatewayConfig
from gateway.router import Policy
from gateway.server import Gateway
from kvstore import logs
from kvstore.errors import KvError
from kvstore.ranges import THREADS, Finite
from kvstore.registry import new_incarnation

DEFAULTS = GatewayConfig(redis="redis://127.0.0.1:6379/0")


@click.command("gateway", context_settings={"auto_envvar_prefix": "OCTAVO", "show_default": True})
@click.option("--redis", default=DEFAULTS.redis, help="URL of the broker.")
@click.option("--namespace", default=DEFAULTS.namespace, help="Fleet within the broker.")
@click.option("--host", default=DEFAULTS.host, help="Address to listen on; others than loopback need keys and TLS.")
@click.option("--grpc-port", type=click.IntRange(0, 65535), default=DEFAULTS.grpc_port, help="0: any free port.")
@click.option("--metrics-port", type=click.IntRange(0, 65535), default=DEFAULTS.metrics_port, help="0: any free port.")
@click.option(
    "--http-port",
    type=click.IntRange(0, 65535),
    default=DEFAULTS.http_port,
    help="OpenAI's HTTP API; 0: any free port. Default: none.",
)
@click.option(
    "--batches",
    type=click.Path(file_okay=False),
    default=DEFAULTS.batches,
    show_default=False,
    help="Folder for /v1/files and /v1/batches, shared with octavo batch worker. Default: HTTP has neither.",
)
@click.option(
    "--reuse-port",
    is_flag=True,
    default=DEFAULTS.reuse_port,
    help="Share the gRPC and HTTP ports with other gateways that do so too.",
)
@click.option("--max-queue", type=click.IntRange(1), default=DEFAULTS.max_queue, help="Unfinished jobs of one worker.")
@click.option(
    "--policy",
    type=click.Choice([policy.value for policy in Policy]),
    default=DEFAULTS.policy,
    help="How workers are chosen.",
)
@click.option("--pages", default=DEFAULTS.pages, help="Where workers keep pages: none, redis, or dir:PATH.")
@click.option(
    "--pages-redis", default=DEFAULTS.pages_redis, show_default=False, help="With it pages are in this server."
)
@click.option(
    "--pages-ttl",
    type=Finite(min=1),
    default=DEFAULTS.pages_ttl,
    help="Seconds without use after which one is forgotten.",
)
@click.option("--max-streams", type=click.IntRange(1), default=DEFAULTS.max_streams, help="Open Generate calls.")
@click.option(
    "--grace",
    "grace_s",
    type=Finite(0),
    default=DEFAULTS.grace_s,
    envvar="OCTAVO_GRACE",
    help="Seconds that streams may go on after SIGTERM or Ctrl-C. A second signal ends them at once.",
)
@click.option(
    "--keys",
    default=DEFAULTS.keys,
    show_default=False,
    help="API keys that callers need: a file, or redis. Default: none.",
)
@click.option(
    "--tls-cert",
    default=DEFAULTS.tls_cert,
    show_default=False,
    help="Certificate chain to listen with, PEM. Default: plaintext.",
)
@click.option("--tls-key", default=DEFAULTS.tls_key, show_default=False, help="Its private key, PEM.")
@click.option(
    "--tls-client-ca",
    default=DEFAULTS.tls_client_ca,
    show_default=False,
    help="Callers need certificates of these, PEM.",
)
@click.option("--insecure", is_flag=True, help="Listen where others can reach it without keys and TLS.")
@click.option(
    "--otlp",
    default=DEFAULTS.otlp,
    show_default=False,
    help="URL of an OpenTelemetry collector (gRPC) for traces of requests.",
)
@click.option("--log-format", type=click.Choice(logs.FORMATS), default=DEFAULTS.log_format, help="Of what it logs.")
@click.option("--tokenizer-threads", type=THREADS, default=DEFAULTS.tokenizer_threads, help="Threads for prompts.")
def command(**options: object) -> None:
    """Serve gRPC, and HTTP with --http-port, on behalf of a fleet of workers.

    Prints one line when it serves: "ready" and a JSON object with the addresses. Logs go to stderr. Every option is
    also read from OCTAVO_<NAME>.
    """
    config, incarnation = GatewayConfig(**options), new_incarnation()  # type: ignore[arg-type]
    logs.configure(config.log_format, role="gateway", incarnation=incarnation)
    try:
        asyncio.run(serve(config, incarnation))
    except (KvError, OSError, RuntimeError) as error:
        raise logs.Ends(str(error), config.log_format) from error


async def serve(config: GatewayConfig, incarnation: str) -> None:
    """Runs a gateway until SIGTERM or SIGINT, and through its drain."""
    gateway = Gateway(config, incarnation)
    ready = await gateway.start()
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, on_signal)
    click.echo(f"ready {json.dumps(asdict(ready))}")
    await stop.wait()
    await gateway.stop(hurry)


if __name__ == "__main__":
    command()
