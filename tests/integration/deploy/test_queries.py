"""Every query of the dashboard and the alerts, asked of a real Prometheus that has scraped a gateway and a worker."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from prometheus_client import start_http_server

from octavo.v1.inference_pb2 import GenerateRequest, Stopping, TokenIds
from ops.client import Client
from tests.integration.gateway.harness import running_gateway
from tests.integration.worker.one_worker import running_worker
from tests.support.waiting import until
from worker.config import PagesConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from kvstore.client import Broker

DEPLOY = Path(__file__).parents[3] / "deploy"
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None, reason="prometheus and promtool are not on PATH (Debian: prometheus)"
)
WINDOW = "20s"
EMPTY_WHILE_ALL_IS_WELL = {
    "absent(octavo_broker_up)",  # something only where nothing is
    "sum by (error) (rate(octavo_pages_errors_total[$__rate_interval]))",  # no call of the store has failed
    "sum by (error) (rate(octavo_pages_errors_total[5m]))",
}
POOL_TOKENS = 1024


def rules() -> list[dict[str, Any]]:
    told = yaml.safe_load((DEPLOY / "alerts.yml").read_text())
    return [rule for group in told["groups"] for rule in group["rules"]]


def watched(expression: str) -> str:
    """What an alert compares with a number."""
    return re.sub(r"\s[<>]\s[\d.]+$", "", expression)


def queries() -> list[str]:
    """All of them, once each."""
    dashboard = json.loads((DEPLOY / "grafana" / "octavo.json").read_text())
    told = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return [*dict.fromkeys([*told, *(watched(rule["expr"]) for rule in rules())])]


class Asked:
    """A running Prometheus."""

    def __init__(self, address: str) -> None:
        self.address = address

    def get(self, path: str, **parameters: str) -> Any:
        url = f"http://{self.address}{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def values(self, query: str) -> list[float]:
        """Of all series that it gives, but for those that are no numbers."""
        asked = query.replace("$__rate_interval", WINDOW).replace("$model", ".*")
        told = json.loads(self.get("/api/v1/query", query=asked))
        assert told["status"] == "success", query
        numbers = [float(series["value"][1]) for series in told["data"]["result"]]
        return [number for number in numbers if not math.isnan(number)]

    def silent(self, asked: set[str]) -> list[str]:
        """Queries that give nothing. What has given something need not be asked again: a scrape may come too late, and
        then what is asked of this moment gives nothing for this moment."""
        return [query for query in asked if not self.values(query)]


@contextmanager
def prometheus(folder: Path, **targets: str) -> Iterator[Asked]:
    """One that scrapes these, by job, five times a second, with the configuration of deploy/ for all else."""
    assert PROMETHEUS is not None
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    assert {job["job_name"] for job in config["scrape_configs"]} >= targets.keys()
    config["global"] = dict.fromkeys(("scrape_interval", "scrape_timeout", "evaluation_interval"), "200ms")
    config["rule_files"] = [str(DEPLOY / name) for name in config["rule_files"]]
    config["scrape_configs"] = [
        {"job_name": job, "static_configs": [{"targets": [target]}]} for job, target in targets.items()
    ]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    process = subprocess.Popen(
        [
            *(PROMETHEUS, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"),
            *(f"--web.listen-address={address}", "--log.level=error"),
        ]
    )
    try:
        yield Asked(address)
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def traffic(client: Client) -> AsyncIterator[Callable[[], None]]:
    """Prompts that are new, and evict, and prompts that come again soon, four at a time. Gives what raises the error of
    one that has failed."""
    numbers = count(1)

    async def ask() -> None:
        while True:
            number = next(numbers)
            for prompt in (number, number, number - 1):
                ids = [(prompt * 31 + index) % 200 + 10 for index in range(130)]
                stopping = Stopping(max_tokens=4, ignore_eos=True)
                await client.generate(GenerateRequest(token_ids=TokenIds(ids=ids), stopping=stopping), timeout=20)

    def check() -> None:
        for task in asking:
            assert not task.done(), task.result()

    asking = [asyncio.create_task(ask()) for _ in range(4)]
    try:
        yield check
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


@needs_prometheus
async def test_every_query_gives_something(broker: Broker, tmp_path: Path) -> None:
    pages = PagesConfig(redis=broker.config.url)
    simulated = Path("simulated:20000,1")
    async with (
        running_worker(broker, simulated, tmp_path, dtype="auto", kv_tokens=POOL_TOKENS, pages=pages) as fleet,
        running_gateway(broker, http_port=0) as (_, ready, _),
        Client(ready.grpc) as client,
    ):
        endpoint, serving = start_http_server(0, addr="127.0.0.1", registry=fleet.metrics)
        try:
            await asyncio.to_thread(urllib.request.urlopen, f"http://{ready.http}/v1/models", timeout=5)
            with prometheus(tmp_path, gateway=ready.metrics, worker=f"127.0.0.1:{endpoint.server_port}") as asked:
                await _all_answered(asked, client)
        finally:
            endpoint.shutdown()
            serving.join()
            endpoint.server_close()


async def _all_answered(asked: Asked, client: Client) -> None:
    left = queries()

    async def listening() -> bool:
        try:
            return bool(await asyncio.to_thread(asked.get, "/-/ready"))
        except (OSError, AssertionError):
            return False

    async def answered() -> bool:
        check()
        left[:] = await asyncio.to_thread(asked.silent, {*left, *EMPTY_WHILE_ALL_IS_WELL})
        return set(left) <= EMPTY_WHILE_ALL_IS_WELL

    await until(listening, within_s=10)
    async with traffic(client) as check:
        try:
            await until(answered, within_s=10)
        except TimeoutError:
            pytest.fail(f"nothing is given by {sorted(set(left) - EMPTY_WHILE_ALL_IS_WELL)}")
    assert set(left) == EMPTY_WHILE_ALL_IS_WELL  # else the list of exceptions is too long
    told = json.loads(await asyncio.to_thread(asked.get, "/api/v1/rules"))
    evaluated = {rule["name"]: rule for group in told["data"]["groups"] for rule in group["rules"]}
    assert evaluated.keys() == {rule["alert"] for rule in rules()}
    assert {name: rule.get("lastError") for name, rule in evaluated.items() if rule["health"] != "ok"} == {}
    assert {name for name, rule in evaluated.items() if rule["state"] != "inactive"} == set()


@needs_prometheus
def test_prometheus_takes_its_configuration_and_the_alerts() -> None:
    assert PROMTOOL is not None
    ran = subprocess.run([PROMTOOL, "check", "config", DEPLOY / "prometheus.yml"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{len(rules())} rules found" in ran.stdout


@pytest.mark.parametrize(
    ("expression", "left"),
    [
        ("max(a) > 0", "max(a)"),
        ("a * on (b) (c > bool 0)\n> 60", "a * on (b) (c > bool 0)"),
        ("absent(a)", "absent(a)"),
    ],
)
def test_what_an_alert_watches(expression: str, left: str) -> None:
    assert watched(expression) == left
