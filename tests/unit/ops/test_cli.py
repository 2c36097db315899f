"""The command's table, and that every subcommand in it loads."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ops.cli import COMMANDS, main


def test_help_lists_every_command_on_a_line_of_its_own() -> None:
    result = CliRunner().invoke(main, ["--help"], terminal_width=120)
    assert result.exit_code == 0
    for name, lazy in COMMANDS.items():
        assert f"  {name:<{max(map(len, COMMANDS))}}  {lazy.help}\n" in result.output


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_loads_and_explains_itself(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    assert command.name == name
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert all(getattr(option, "help", "") for option in command.params if isinstance(option, click.Option))


def test_commands_that_print_data_can_print_json() -> None:
    for name in ("generate", "queue", "workers", "top", "explain", "ledger", "bench", "demo"):
        command = main.get_command(click.Context(main), name)
        assert command is not None
        assert "--json" in {flag for param in command.params for flag in param.opts}, name


def test_an_unknown_command_is_refused() -> None:
    result = CliRunner().invoke(main, ["nonsense"])
    assert result.exit_code == 2
    assert "No such command 'nonsense'" in result.output


def test_the_installed_command_is_this_one() -> None:
    installed = Path(sys.executable).with_name("octavo")
    ran = subprocess.run([installed, "--version"], capture_output=True, text=True, check=True, timeout=50)
    assert ran.stdout == f"octavo, version {version('octavo')}\n"
