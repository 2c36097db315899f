"""The command lines of a fleet's processes."""

from __future__ import annotations

import socket

import click
import pytest
from click.testing import CliRunner

from gateway.__main__ import command as gateway_command
from gateway.router import Policy
from ops.cli import main
from ops.config import POLICIES, FleetConfig, fleet_config, fleet_options
from ops.reach import Target
from worker.__main__ import command as worker_command


@pytest.mark.parametrize("name", ["up", "gateway", "worker", "bench"])
def test_help_tells_no_default_where_there_is_none(name: str) -> None:
    said = " ".join(CliRunner().invoke(main, [name, "--help"]).output.split())
    assert "default: " in said
    assert [each for each in ("default: ()", 'default: ""') if each in said] == []


def test_help_of_a_fleet_tells_what_workers_choose() -> None:
    said = " ".join(CliRunner().invoke(main, ["up", "--help"]).output.split())
    assert "in tokens. Default: 32768. [env var: OCTAVO_KV_TOKENS; x>=32]" in said
    assert "Default: all. [env var: OCTAVO_CACHE_TOKENS; x>=0]" in said
    assert "default: (" not in said


def flags(arguments: list[str]) -> dict[str, str]:
    return dict(zip(arguments[1::2], arguments[2::2], strict=True))


def test_a_worker_is_told_what_was_asked_for_and_no_more() -> None:
    config = FleetConfig(workers=2, model="m", kv_tokens=4096, block_size=8)
    assert config.worker_arguments(1, cores=8) == [
        "worker",
        *("--id", "w1", "--namespace", "default", "--model", "m", "--dtype", "auto", "--kv-dtype", "auto"),
        *("--device", "auto", "--kernels", "auto"),
        *("--threads", "4", "--metrics-port", "0", "--grace", "30", "--kv-tokens", "4096", "--block-size", "8"),
    ]


def test_all_sizes_are_passed_on() -> None:
    config = FleetConfig(
        kv_tokens=64, cache_tokens=0, block_run=8, max_running=2, step_tokens=32, chunk_tokens=16, threads=1
    )
    given = flags(config.worker_arguments(0, cores=1))
    assert given["--block-run"] == "8"
    assert [given[f"--{name}-tokens"] for name in ("kv", "cache", "step", "chunk")] == ["64", "0", "32", "16"]


def test_workers_are_told_not_to_take_jobs_from_each_other() -> None:
    assert FleetConfig(steal=False).worker_arguments(0, cores=1)[-1] == "--no-steal"
    context = worker_command.make_context("worker", ["--no-steal"])
    assert context.params["steal"] is False
    context.close()


def test_a_gateway_keeps_the_port_that_it_had() -> None:
    config = FleetConfig(grpc_port=0, grace=2.5)
    assert config.gateway_arguments(0) == [
        "gateway",
        *("--namespace", "default", "--grpc-port", "0", "--metrics-port", "0", "--policy", "prefix", "--grace", "2.5"),
    ]
    assert flags(config.gateway_arguments(0, grpc_port=4711))["--grpc-port"] == "4711"


def test_a_fleet_knows_the_policies_of_its_gateways() -> None:
    assert tuple(Policy) == POLICIES
    for policy in POLICIES:
        assert flags(FleetConfig(policy=policy).gateway_arguments(0))["--policy"] == policy


def test_ports_count_up_from_their_base() -> None:
    config = FleetConfig(workers=2, gateways=2, grpc_port=6000, metrics_port=9100)
    gateways = [flags(config.gateway_arguments(index)) for index in range(2)]
    workers = [flags(config.worker_arguments(index, cores=1)) for index in range(2)]
    assert [each["--grpc-port"] for each in gateways] == ["6000", "6001"]
    assert [each["--metrics-port"] for each in (*gateways, *workers)] == ["9100", "9101", "9102", "9103"]


def test_http_has_ports_where_it_is_asked_for() -> None:
    config = FleetConfig(gateways=2, http_port=8000)
    assert [flags(config.gateway_arguments(index))["--http-port"] for index in range(2)] == ["8000", "8001"]
    assert flags(config.gateway_arguments(1, 50052, 4711))["--http-port"] == "4711"
    assert [flags(FleetConfig(gateways=2, http_port=0).gateway_arguments(1))["--http-port"]] == ["0"]
    assert "--http-port" not in flags(FleetConfig().gateway_arguments(0))


def test_cores_are_shared_out() -> None:
    assert [FleetConfig(workers=n).threads_per_worker(cores=8) for n in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]
    assert FleetConfig(workers=4, threads=3).threads_per_worker(cores=2) == 3


def test_ids_tell_machines_apart_where_they_share_a_broker() -> None:
    assert FleetConfig(workers=2).worker_ids() == ["w0", "w1"]
    shared = FleetConfig(workers=2, redis="redis://there").worker_ids()
    host = shared[0].removesuffix("-w0")
    assert shared == [f"{host}-w0", f"{host}-w1"]
    assert host in (socket.gethostname(), socket.gethostname()[:48])


def test_what_the_fleet_passes_on_is_known_to_its_processes() -> None:
    config = FleetConfig(
        kv_tokens=64,
        cache_tokens=32,
        block_size=4,
        block_run=2,
        max_running=2,
        step_tokens=32,
        chunk_tokens=16,
        threads=1,
        http_port=0,
    )
    for command, arguments in (
        (gateway_command, config.gateway_arguments(0)),
        (worker_command, config.worker_arguments(0, cores=1)),
    ):
        known = {flag for param in command.params for flag in param.opts}
        assert set(flags(arguments)) <= known


def test_options_become_a_config_and_leave_the_rest() -> None:
    seen: list[tuple[FleetConfig, dict[str, object]]] = []

    @click.command()
    @click.option("--other")
    @fleet_options(workers=2, grpc_port=0)
    def command(**values: object) -> None:
        seen.append((fleet_config(values), values))

    result = CliRunner().invoke(
        command, ["--workers", "3", "--other", "x", "--kv-tokens", "512"], env={"OCTAVO_DTYPE": "float32"}
    )
    assert result.exit_code == 0, result.output
    assert seen == [(FleetConfig(workers=3, grpc_port=0, dtype="float32", kv_tokens=512), {"other": "x"})]


def test_where_pages_go_is_passed_on_but_a_url_is_not_shown_to_others() -> None:
    config = FleetConfig(
        pages="dir:/there", pages_redis="redis://:secret@pages", pages_bytes=10, pages_ttl=60.0, spill_buffer=5
    )
    given = flags(config.worker_arguments(0, cores=1))
    assert (given["--pages"], given["--pages-bytes"], given["--pages-ttl"]) == ("dir:/there", "10", "60.0")
    assert given["--spill-buffer"] == "5"
    assert not any("secret" in part for part in config.worker_arguments(0, cores=1))
    known = {flag for param in worker_command.params for flag in param.opts}
    assert set(given) <= known
    given = flags(config.gateway_arguments(0))
    assert (given["--pages"], given["--pages-ttl"]) == ("dir:/there", "60.0")
    assert set(given) <= {flag for param in gateway_command.params for flag in param.opts}


def test_a_place_for_pages_that_is_none_is_refused_by_the_fleet() -> None:
    with pytest.raises(click.BadParameter):
        fleet_config({"pages": "disk"})


@pytest.mark.parametrize(
    ("text", "targets"),
    [("a:1", ["a:1"]), ("a:1,b:2", ["a:1", "b:2"]), (" a:1 , ,b:2,", ["a:1", "b:2"]), ("", [""]), (",", [","])],
)
def test_gateways_are_named_with_commas_between_them(text: str, targets: list[str]) -> None:
    assert Target(text).addresses == targets
