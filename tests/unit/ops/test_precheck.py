"""What `octavo up` refuses before anything is started."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import click
import pytest
import torch
from click.testing import CliRunner

from ops import precheck
from ops.config import FleetConfig
from ops.up import command
from worker import look
from worker.__main__ import command as worker_command
from worker.kernels.native.library import LEVELS, NativeUnavailableError
from worker.options import SHARED

if TYPE_CHECKING:
    from pathlib import Path

NO_WEIGHTS = "a simulated model has no weights, and runs on the processor: --dtype and --device auto"


def refused(*arguments: str) -> str:
    """Why. Nothing may have been started by then: nobody said so."""
    ran = CliRunner().invoke(command, ["--grpc-port", "0", *arguments], prog_name="octavo up")
    assert ran.exit_code in (1, 2), ran.output
    assert "starting" not in ran.output
    return ran.output.splitlines()[-1].removeprefix("Error: ")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            ("--kv-tokens", "5"),
            "Invalid value for '--kv-tokens' (env var: 'OCTAVO_KV_TOKENS'): 5 is not in the range x>=32.",
        ),
        (("--block-size", "17"), "Invalid value for --block-size: 17 is not a power of two"),
        (
            ("--kv-tokens", "63", "--block-size", "32"),
            "Invalid value for --kv-tokens: 63 tokens are less than two blocks of 32",
        ),
        (
            ("--redis", "nonsense:secret"),
            "not a URL of a broker: redis://, rediss:// or unix://, host, port and database",
        ),
        (("--metrics-port", "65535"), "Invalid value for --metrics-port: 2 ports from 65535 on end beyond 65535"),
        (
            ("--http-port", "65535", "--gateways", "2"),
            "Invalid value for --http-port: 2 ports from 65535 on end beyond 65535",
        ),
        (("--model", "simulated:0,1"), "model 'simulated:0,1': PREFILL_TOK_S must be above 0, times 0 ms or more"),
        (("--model", "simulated", "--device", "cuda"), NO_WEIGHTS),
        (("--model", "simulated", "--dtype", "float32"), NO_WEIGHTS),
    ],
)
def test_what_can_be_seen_at_first_sight(arguments: tuple[str, ...], reason: str) -> None:
    assert refused(*arguments) == reason


def test_a_folder_for_pages_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, why in (
        ("/proc/nope", "No such file or directory"),
        (str(tmp_path / "file"), "File exists"),
        (str(tmp_path / "file" / "below"), "Not a directory"),
        ("~nobody-of-that-name/pages", "Could not determine home directory."),
    ):
        assert refused("--pages", f"dir:{path}") == f"--pages dir:{path}: that folder can't be made: {why}"


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    assert refused("--model", str(tmp_path)) == f"{tmp_path} has no config.json"


def seen(model: str, device: str) -> str:
    """Why a worker could not load that, without a process of its own: that brings torch along, and takes seconds."""
    with pytest.raises(SystemExit) as ended:
        look.main(model, "auto", device)
    return str(ended.value)


def test_a_model_that_is_not_there() -> None:
    places = "give a directory of safetensors, a GGUF file, smollm2-135m, or simulated"
    assert seen("nosuch", "auto") == f"no model 'nosuch': {places}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_a_device_that_is_not_there() -> None:
    assert seen("smollm2-135m", "cuda") == "device cuda: PyTorch finds none here"


def test_a_port_that_is_taken_of_any_process() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for option in ("--grpc-port", "--metrics-port", "--http-port"):
            assert refused(option, str(port)) == (
                f"cannot listen on 127.0.0.1:{port}: Address already in use; "
                f"choose another port with {option}, or any free one with {option} 0"
            )
        with pytest.raises(click.ClickException, match="cannot listen on"):  # as the second one's
            precheck.check_ports(FleetConfig(gateways=2, grpc_port=port - 1))


def test_kernels_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(level: str, threads: int) -> None:
        raise NativeUnavailableError(f"this processor can't run the kernels for {level}, on {threads} threads")

    monkeypatch.setattr("worker.kernels.native.library.Native", none)
    precheck.check_kernels("auto")
    precheck.check_kernels("none")
    for level in LEVELS:
        with pytest.raises(click.BadParameter, match=f"kernels for {level}"):
            precheck.check_kernels(level)


def test_options_are_those_of_a_worker() -> None:
    ours, theirs = ({each.opts[0]: each for each in one.params} for one in (command, worker_command))
    for name, settings in SHARED.items():
        first = name.partition("/")[0]  # of a switch
        assert isinstance(ours[first], click.Option)
        assert ours[first].type.to_info_dict() == theirs[first].type.to_info_dict()
        told = ours[first].help
        assert told is not None
        assert told.removesuffix(f" Default: {settings['default']}.") == settings["help"]
