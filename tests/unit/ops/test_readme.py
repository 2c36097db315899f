"""What the pages say exists: commands, options, make targets, files."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest

from ops.cli import COMMANDS, main

ROOT = Path(__file__).parents[3]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "deploy/README.md",
    "docs/clients.md",
    "docs/failures.md",
    "docs/operating.md",
    "docs/tuning.md",
    "docs/wire.md",
    "bench/peers/README.md",
    "bench/results/2026-11-30-kernels.md",
    "bench/results/2026-11-30-pages.md",
    "bench/results/2026-11-30-path.md",
    "bench/results/2026-11-30-peers.md",
    "bench/results/2026-11-30-routing.md",
    "bench/results/2026-11-30-tune.md",
    "bench/results/2026-12-01-chaos.md",
    "bench/results/2026-12-01-containers.md",
    "bench/results/2026-12-01-index.md",
    "bench/results/2026-12-01-routing.md",
    "bench/results/2026-12-01-streams.md",
)


def console_lines(page: str) -> list[str]:
    """Commands in the page's fenced blocks, without prompts."""
    blocks = re.findall(r"^```(?:console)?\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("page", PAGES)
def test_octavo_commands_take_the_options_that_are_shown(page: str) -> None:
    text = (ROOT / page).read_text()
    shown = [shlex.split(line, comments=True) for line in console_lines(page) if line.startswith("octavo ")]
    shown += [shlex.split(each) for each in re.findall(r"`(octavo [a-z][^`]*)`", text)]
    for _, name, *arguments in shown:
        command = main.get_command(click.Context(main), name)
        assert command is not None, name
        if isinstance(command, click.Group) and arguments and not arguments[0].startswith("-"):
            command = command.get_command(click.Context(command), arguments[0])
            assert command is not None, f"{name} {arguments[0]}"
        known = {flag for param in command.params for flag in param.opts} | {"--help"}
        assert {word for word in arguments if word.startswith("--")} <= known, f"octavo {name} {arguments}"


def test_every_command_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    assert [name for name in COMMANDS if f"`octavo {name}" not in text] == []


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_exist(page: str) -> None:
    targets = {line.split()[1] for line in console_lines(page) if re.match(r"make [a-z]", line)}
    for target in targets:
        subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True, timeout=50)


@pytest.mark.parametrize("page", [*PAGES, "ARCHITECTURE.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text())
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_every_page_is_known() -> None:
    """So that a new page's commands are checked as well."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    if listed.returncode == 0:
        assert set(listed.stdout.split()) <= {*PAGES, "ARCHITECTURE.md", "CHANGELOG.md", "tests/CASES.md"}
