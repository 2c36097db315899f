"""How commands end when they are interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import click
import pytest
from click.testing import CliRunner

from ops import cli
from ops.cli import Lazy
from ops.console import INTERRUPTED, ended_by_sigterm, interruptible

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_what_runs_with_one_word(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, interruptible():
        signal.raise_signal(number)
    assert ended.value.code == INTERRUPTED == 130
    assert capsys.readouterr() == ("", "octavo: interrupted\n")
    assert signal.getsignal(signal.SIGTERM) is before


def test_who_has_an_end_of_its_own_is_left_to_it() -> None:
    with interruptible():
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            kept = True
    assert kept


def test_other_threads_may_not_say_what_signals_do() -> None:
    done: list[bool] = []

    def run() -> None:
        with ended_by_sigterm():
            done.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done == [True]


@click.command("tune")
def interrupted() -> None:
    raise KeyboardInterrupt


def test_every_command_ends_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.COMMANDS, "tune", Lazy(__name__, "interrupted", ""))
    ran = CliRunner().invoke(cli.main, ["tune"])
    assert (ran.exit_code, ran.output) == (INTERRUPTED, "octavo: interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_while_a_command_is_still_imported_too(number: signal.Signals, tmp_path: Path) -> None:
    """A module that tells when it is being imported, and then takes its time: in short sleeps, as a signal that comes
    right before one does not end it."""
    slow = "import time\nprint('importing', flush=True)\nfor _ in range(6000):\n    time.sleep(0.01)\n"
    (tmp_path / "slow_command.py").write_text(slow)
    code = (
        "from ops import cli\n"
        "cli.COMMANDS['slow'] = cli.Lazy('slow_command', 'command', '')\n"
        "cli.main(['slow'], prog_name='octavo')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (INTERRUPTED, "octavo: interrupted\n")
