"""The `octavo` command: one group, whose subcommands load only when they run.

A worker's imports (torch, transformers) take seconds and a gateway needs none of them, so nothing is imported before it
is asked for, and `octavo --help` reads its lines from a table.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import click


@dataclass(frozen=True, slots=True)
class Lazy:
    """A subcommand that is imported when it is called."""

    module: str
    attribute: str
    help: str


COMMANDS = {
    "up": Lazy("ops.up", "command", "Run a whole fleet in the foreground: broker, gateways, workers."),
    "gateway": Lazy("gateway.__main__", "command", "Run one gateway."),
    "worker": Lazy("worker.__main__", "command", "Run one worker."),
    "generate": Lazy("ops.generate", "command", "Send one request and stream its answer to the terminal."),
    "attach": Lazy("ops.attach", "command", "Stream the output of a request that was sent before."),
    "queue": Lazy("ops.show", "queue", "Show what waits and runs in each worker's queue."),
    "workers": Lazy("ops.show", "workers", "Show the live workers."),
    "top": Lazy("ops.top", "command", "Watch the fleet as it works."),
    "explain": Lazy("ops.explain", "command", "Show why a job went where it went, and what it found there."),
    "ledger": Lazy("ops.ledger", "command", "Show what became of all accepted requests, and whether it adds up."),
    "dead": Lazy("ops.dead", "command", "Show, retry or forget jobs that too many workers died of."),
    "batch": Lazy("ops.batch.command", "command", "Run files of requests in the background."),
    "keys": Lazy("ops.keys", "command", "Make, show or revoke API keys, and limit their tenants."),
    "health": Lazy("ops.health", "command", "Ask whether a gateway or worker serves."),
    "bench": Lazy("bench.command", "command", "Measure throughput and latency, as JSON and a plot."),
    "tune": Lazy("bench.tune_command", "command", "Find the size of blocks for this machine."),
    "demo": Lazy("ops.demo", "command", "Start a fleet, ask it eight questions, stop it."),
}


class LazyGroup(click.Group):
    """A group over `COMMANDS`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        lazy = COMMANDS.get(cmd_name)
        if lazy is None:
            return None
        command = getattr(importlib.import_module(lazy.module), lazy.attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{lazy.module}.{lazy.attribute} is no click command")
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Signals are minded from here on: what a command imports takes seconds."""
        from ops.console import interruptible

        with interruptible():
            return super().invoke(ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, lazy.help) for name, lazy in COMMANDS.items()])


@click.group("octavo", cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="octavo")
def main() -> None:
    """Octavo: language models served by a fleet of workers.

    Settings can also come from OCTAVO_* variables: each command's --help names them.
    """


if __name__ == "__main__":
    main()
