"""The dashboard and the alerts as files: they agree with each other, the provisioning, and docs/operating.md."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
UNSHOWN: frozenset[str] = frozenset()
"""Metrics of docs/operating.md that the dashboard leaves out."""
PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes"}


@cache
def dashboard() -> dict[str, Any]:
    told: dict[str, Any] = json.loads((DEPLOY / "grafana" / "octavo.json").read_text())
    return told


def panels() -> Iterator[dict[str, Any]]:
    return (each for each in dashboard()["panels"] if each["type"] != "row")


def rules() -> list[dict[str, Any]]:
    told = yaml.safe_load((DEPLOY / "alerts.yml").read_text())
    return [rule for group in told["groups"] for rule in group["rules"]]


def metrics_in(text: str) -> set[str]:
    """Names of families: a histogram's without the suffix of its series."""
    found = set(re.findall(r"\b(?:octavo|process)_[a-z_]+\b", text))
    bases = {name: re.sub(r"_(?:bucket|sum|count)$", "", name) for name in found}
    return {base if base in promised() else name for name, base in bases.items()}


def promised() -> set[str]:
    section = (ROOT / "docs/operating.md").read_text().partition("## Metrics")[2].partition("\n## ")[0]
    return set(re.findall(r"`(octavo_[a-z_]+)", section))


def test_every_metric_of_the_page_is_shown_and_no_other() -> None:
    shown = metrics_in(" ".join(target["expr"] for panel in panels() for target in panel["targets"]))
    assert shown - PROCESS == promised() - UNSHOWN
    assert metrics_in(" ".join(rule["expr"] for rule in rules())) <= promised()


def test_panels_are_whole_and_do_not_lie_on_each_other() -> None:
    ids = [each["id"] for each in dashboard()["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for each in dashboard()["panels"]:
        at = each["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken, each["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    for panel in panels():
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        refs = [target["refId"] for target in panel["targets"]]
        assert refs
        assert len(refs) == len(set(refs))
        for target in panel["targets"]:
            assert target["legendFormat"]
            assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_counters_are_shown_as_rates_over_the_intervals_that_grafana_chooses() -> None:
    for panel in panels():
        for target in panel["targets"]:
            counters = re.findall(r"[a-z_]+_(?:total|bucket|sum|count)\b", target["expr"])
            rates = re.findall(r"rate\([a-z_]+(?:\{[^}]*\})?\[\$__rate_interval\]\)", target["expr"])
            assert len(counters) == len(rates), target["expr"]


def test_variables_are_defined() -> None:
    defined = {each["name"] for each in dashboard()["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps([*panels()])))
    assert used <= defined


def test_provisioning_finds_datasource_and_dashboard() -> None:
    (source,) = yaml.safe_load((DEPLOY / "grafana" / "datasource.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((DEPLOY / "grafana" / "dashboards.yml").read_text())["providers"]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    mounts = dict(reversed(mount.split(":")[:2]) for mount in compose["grafana"]["volumes"])
    scraped = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    assert source["jsonData"]["timeInterval"] == scraped["global"]["scrape_interval"]
    assert mounts[f"{provider['options']['path']}/octavo.json"] == "./grafana/octavo.json"
    assert scraped["rule_files"] == ["alerts.yml"]
    assert "./alerts.yml:/etc/octavo/alerts.yml:ro" in compose["prometheus"]["volumes"]


def test_alerts_say_what_is_the_matter_and_how_bad_it_is() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names))
    for rule in rules():
        assert rule["alert"].startswith("Octavo")
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"].endswith(".")
