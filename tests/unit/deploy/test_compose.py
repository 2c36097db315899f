"""What deploy/ promises, read from its files: needs no container engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
SERVICES = ("redis", "pages-redis", "gateway", "worker", "batch", "prometheus", "grafana")
METRICS_PORT = 9100


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return document


def conf(name: str) -> dict[str, str]:
    """Settings of a Redis, by name."""
    lines = (line.split(None, 1) for line in (DEPLOY / name).read_text().splitlines())
    return {parts[0]: parts[1] for parts in lines if parts and not parts[0].startswith("#")}


@pytest.fixture(scope="module")
def dockerfile() -> list[tuple[str, str]]:
    """Instructions and their arguments, continuation lines joined."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    parts = (line.split(None, 1) for line in text.splitlines())
    return [(found[0], found[1]) for found in parts if found]


def test_services(compose: dict[str, Any]) -> None:
    assert set(compose["services"]) == set(SERVICES)
    assert "name" not in compose, "docker-compose 1.x refuses it"
    assert "version" not in compose, "with it, 1.x refuses depends_on conditions"
    for name in ("gateway", "worker"):
        assert compose["services"][name]["deploy"] == {"replicas": 2}


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_hardened_and_watched(compose: dict[str, Any], name: str) -> None:
    service = compose["services"][name]
    assert service["restart"] == "unless-stopped"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["healthcheck"]["test"][0] == "CMD"
    assert service["mem_limit"]
    assert service["pids_limit"] == 512
    # Scaling needs names and ports that are not fixed.
    assert "container_name" not in service


def test_nothing_is_published_beyond_loopback(compose: dict[str, Any]) -> None:
    ports = {name: service.get("ports", []) for name, service in compose["services"].items()}
    assert ports["redis"] == ports["pages-redis"] == ports["worker"] == ports["batch"] == []
    assert all(port.startswith("127.0.0.1:") for published in ports.values() for port in published)
    assert compose["networks"]["inner"] == {"internal": True}


def test_the_gateway_listens_where_its_ports_lead(compose: dict[str, Any]) -> None:
    gateway = compose["services"]["gateway"]
    listens = {gateway["environment"][name] for name in ("OCTAVO_GRPC_PORT", "OCTAVO_HTTP_PORT")}
    assert {port.rpartition(":")[2] for port in gateway["ports"]} == listens


def test_all_but_grafana_meet_redis_on_a_network_without_a_way_out(compose: dict[str, Any]) -> None:
    """Redis has no password there."""
    inside = {name for name, each in compose["services"].items() if "inner" in each["networks"]}
    assert inside == {*SERVICES} - {"grafana"}
    assert compose["services"]["grafana"]["networks"] == ["console"]
    assert "console" in compose["services"]["prometheus"]["networks"]


def test_who_looks_at_grafana_can_not_log_in(compose: dict[str, Any]) -> None:
    told = compose["services"]["grafana"]["environment"]
    assert (told["GF_AUTH_DISABLE_LOGIN_FORM"], told["GF_AUTH_BASIC_ENABLED"]) == ("true", "false")
    assert told["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"


def test_what_is_insecure_is_on_loopback_alone(compose: dict[str, Any]) -> None:
    gateway = compose["services"]["gateway"]
    assert gateway["environment"]["OCTAVO_INSECURE"] == "1"
    assert all(port.startswith("127.0.0.1:") for port in gateway["ports"])


def test_prometheus_meets_the_others_on_one_network(compose: dict[str, Any]) -> None:
    networks = {name: set(service["networks"]) for name, service in compose["services"].items()}
    for scraped in ("gateway", "worker"):
        assert networks["prometheus"] & networks[scraped] == {"inner"}


def test_a_gateway_is_healthy_without_workers_and_a_worker_only_when_it_serves(compose: dict[str, Any]) -> None:
    checks = {name: compose["services"][name]["healthcheck"]["test"][1:3] for name in ("gateway", "worker")}
    assert checks == {"gateway": ["octavo", "health"], "worker": ["octavo", "health"]}
    assert "--alive" in compose["services"]["gateway"]["healthcheck"]["test"]
    assert "--metrics" in compose["services"]["worker"]["healthcheck"]["test"]


@pytest.mark.parametrize("name", ["gateway", "worker", "batch"])
def test_octavo_waits_for_a_healthy_redis(compose: dict[str, Any], name: str) -> None:
    service = compose["services"][name]
    assert service["depends_on"] == {"redis": {"condition": "service_healthy"}}
    assert service["environment"]["OCTAVO_REDIS"].startswith("redis://redis:6379")
    assert service["image"] == compose["services"]["gateway"]["image"]
    assert (ROOT / "deploy" / service["build"]["context"] / service["build"]["dockerfile"]).resolve().is_file()


def test_batches_are_in_a_volume_and_run_through_the_gateway(compose: dict[str, Any]) -> None:
    service = compose["services"]["batch"]
    folder = service["environment"]["OCTAVO_BATCHES"]
    assert service["volumes"] == [f"batches:{folder}"]
    assert f"/var/cache/octavo {folder}\n" in (DEPLOY / "Dockerfile").read_text(), "the user of the image owns it"
    host, _, port = service["environment"]["OCTAVO_TARGET"].partition(":")
    gateway = compose["services"][host]
    assert gateway["environment"]["OCTAVO_GRPC_PORT"] == port
    assert (gateway["environment"]["OCTAVO_BATCHES"], gateway["volumes"]) == (folder, service["volumes"])
    assert set(service["networks"]) & set(gateway["networks"]) == {"inner"}
    assert service["healthcheck"]["test"] == ["CMD", "octavo", "batch", "workers", "--here"]


def test_mounted_files_and_volumes_exist(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            if source.startswith("./"):
                assert (DEPLOY / source).is_file()
                assert mount.endswith(":ro")
            else:
                assert source in compose["volumes"]


def test_prometheus_finds_replicas_by_name() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    found = {job["job_name"]: job.get("dns_sd_configs", [{}])[0] for job in config["scrape_configs"]}
    for name in ("gateway", "worker"):
        assert found[name]["names"] == [name]
        assert (found[name]["type"], found[name]["port"]) == ("A", METRICS_PORT)


def test_redis_keeps_work() -> None:
    redis_conf = conf("redis.conf")
    assert redis_conf["appendonly"] == "yes"
    assert redis_conf["appendfsync"] == "everysec"
    assert redis_conf["maxmemory-policy"] == "noeviction"
    assert redis_conf["dir"] == "/data"
    assert re.fullmatch(r"[1-9]\d*[mg]b", redis_conf["maxmemory"])


def test_pages_are_a_cache_of_their_own(compose: dict[str, Any]) -> None:
    pages = conf("pages.conf")
    assert (pages["appendonly"], pages["save"], pages["maxmemory-policy"]) == ("no", '""', "allkeys-lru")
    for name in ("gateway", "worker"):
        assert compose["services"][name]["environment"]["OCTAVO_PAGES_REDIS"] == "redis://pages-redis:6379/0"


def test_each_gateway_has_a_port_of_its_own(compose: dict[str, Any]) -> None:
    gateway = compose["services"]["gateway"]
    for port in gateway["ports"]:
        first, last = re.findall(r":-(\d+)-(\d+)}", port)[0]
        assert int(last) - int(first) + 1 == gateway["deploy"]["replicas"]


def test_image_runs_without_root(dockerfile: list[tuple[str, str]]) -> None:
    assert [argument.split()[0] for name, argument in dockerfile if name == "FROM"] == ["debian:bookworm-slim"] * 2
    final = dockerfile[max(index for index, (name, _) in enumerate(dockerfile) if name == "FROM") :]
    users = [argument for name, argument in final if name == "USER"]
    assert users
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1])
    assert ("ENTRYPOINT", '["octavo"]') in final
    assert any(name == "HEALTHCHECK" and f"127.0.0.1:{METRICS_PORT}" in argument for name, argument in final)
    environment = " ".join(argument for name, argument in final if name == "ENV")
    assert f"OCTAVO_METRICS_PORT={METRICS_PORT}" in environment
    assert "OCTAVO_CACHE=/var/cache/octavo" in environment


def test_image_takes_versions_from_the_pins() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert not re.search(r"==\d", text), "versions live in constraints.txt"


def test_build_context_is_an_allow_list() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    needed = {line[1:] for line in lines if line.startswith("!")}
    assert needed >= {
        "pyproject.toml",
        "setup.py",
        "constraints.txt",
        "README.md",
        "proto",
        "kvstore",
        "gateway",
        "worker",
        "ops",
    }
    assert all((ROOT / name).exists() for name in needed)
