"""What deploy/k8s promises: valid by Kubernetes' own published schemas, and hardened. Needs no cluster."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from gateway.config import GatewayConfig, TransportError
from gateway.structure_child import MEMORY_BYTES
from gateway.structures import CHILDREN
from gateway.transport import require_guarded

DEPLOY = Path(__file__).parents[3] / "deploy"
KUSTOMIZATION: dict[str, Any] = yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())
DOCUMENTS: list[dict[str, Any]] = [
    document for name in KUSTOMIZATION["resources"] for document in yaml.safe_load_all((DEPLOY / name).read_text())
]
CUSTOM = ("ScaledObject",)
"""Kinds that Kubernetes does not know by itself."""
PODS = [each for each in DOCUMENTS if each["kind"] in ("Deployment", "StatefulSet")]
VERSION = "1.28"
"""Long out of support: what it knows, later ones know."""


def named(document: dict[str, Any]) -> str:
    return f"{document['kind']}-{document['metadata']['name']}"


def pods_of(document: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = document["spec"]["template"]["spec"]
    return spec


def test_every_file_is_applied() -> None:
    files = {f"k8s/{path.name}" for path in (DEPLOY / "k8s").iterdir()}
    assert set(KUSTOMIZATION["resources"]) == files
    assert {named(each) for each in PODS} == {
        *("StatefulSet-redis", "Deployment-gateway", "Deployment-worker", "Deployment-prometheus"),
    }


@pytest.mark.parametrize("document", [each for each in DOCUMENTS if each["kind"] not in CUSTOM], ids=named)
def test_kubernetes_knows_every_field(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, VERSION, strict=True)


def test_what_it_does_not_know_is_refused() -> None:
    broken = {**PODS[0], "spec": {**PODS[0]["spec"], "replica": 1}}
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(broken, VERSION, strict=True)


@pytest.mark.parametrize("document", PODS, ids=named)
def test_pods_are_restricted_and_watched(document: dict[str, Any]) -> None:
    spec = pods_of(document)
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"startupProbe", "readinessProbe"} & set(container)
    assert "livenessProbe" in container
    assert container["resources"]["requests"]["memory"]
    assert container["resources"]["limits"]["memory"]
    mounted = {each["name"] for each in container["volumeMounts"]}
    claimed = {each["metadata"]["name"] for each in document["spec"].get("volumeClaimTemplates", ())}
    assert mounted == {each["name"] for each in spec["volumes"]} | claimed


def test_gateways_may_listen_where_they_are_told_to() -> None:
    """As they come, and as deploy/README.md patches them."""
    (gateway,) = [each for each in PODS if named(each) == "Deployment-gateway"]
    (container,) = pods_of(gateway)["containers"]
    told = {each["name"]: each["value"] for each in container["env"]}
    require_guarded(configured(told))
    with pytest.raises(TransportError):
        require_guarded(configured({name: told[name] for name in told if name != "OCTAVO_INSECURE"}))
    (text,) = re.findall(r"```yaml\n(.*?)```", (DEPLOY / "README.md").read_text(), re.DOTALL)
    patch = yaml.safe_load(text)
    assert named(patch) == named(gateway)
    (patched,) = pods_of(patch)["containers"]
    assert patched["name"] == container["name"]
    for each in patched["env"]:
        if each.get("$patch") == "delete":
            del told[each["name"]]
        else:
            told[each["name"]] = each["value"]
    require_guarded(configured(told))
    (mount,), (volume,) = patched["volumeMounts"], pods_of(patch)["volumes"]
    assert mount["name"] == volume["name"]
    assert {value.rpartition("/")[0] for value in told.values() if value.startswith("/")} == {mount["mountPath"]}
    assert {name for name in patched if name.endswith("Probe")} == {
        name for name in container if name.endswith("Probe")
    }


def configured(told: dict[str, str]) -> GatewayConfig:
    """By its variables."""
    names = {each.name for each in fields(GatewayConfig)}
    settings: dict[str, Any] = {name.removeprefix("OCTAVO_").lower(): value for name, value in told.items()}
    return GatewayConfig(**{name: value for name, value in settings.items() if name in names})


@pytest.mark.parametrize("document", PODS, ids=named)
def test_labels_lead_to_the_pods(document: dict[str, Any]) -> None:
    name = document["metadata"]["name"]
    assert document["spec"]["selector"]["matchLabels"] == {"app": name}
    assert document["spec"]["template"]["metadata"]["labels"] == {"app": name}
    (service,) = [each for each in DOCUMENTS if named(each) == f"Service-{name}"]
    assert service["spec"]["selector"] == {"app": name}
    ports = {each["containerPort"] for each in pods_of(document)["containers"][0]["ports"]}
    assert {each["port"] for each in service["spec"]["ports"]} == ports


def test_gateways_are_called_as_by_compose() -> None:
    """By gRPC and by HTTP, from anywhere."""
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["gateway"]
    (gateway,) = [each for each in PODS if named(each) == "Deployment-gateway"]
    ports = {
        each["name"]: each["value"]
        for each in pods_of(gateway)["containers"][0]["env"]
        if each["name"] in ("OCTAVO_GRPC_PORT", "OCTAVO_HTTP_PORT")
    }
    assert ports == {name: compose["environment"][name] for name in ports}
    (policy,) = [each for each in DOCUMENTS if named(each) == "NetworkPolicy-gateway-metrics"]
    (open_ports,) = [rule["ports"] for rule in policy["spec"]["ingress"] if "from" not in rule]
    assert sorted(str(each["port"]) for each in open_ports) == sorted(ports.values()) == ["50051", "8000"]


def test_a_gateway_has_memory_for_the_structures_that_it_tries() -> None:
    (gateway,) = [each for each in PODS if named(each) == "Deployment-gateway"]
    limit = pods_of(gateway)["containers"][0]["resources"]["limits"]["memory"]
    assert int(limit.removesuffix("Gi")) << 30 >= (1 << 30) + CHILDREN * MEMORY_BYTES


def test_prometheus_is_given_the_files_that_its_configuration_names() -> None:
    named_there = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["rule_files"]
    (made,) = [each for each in KUSTOMIZATION["configMapGenerator"] if each["name"] == "prometheus"]
    assert made["files"] == ["prometheus.yml", *named_there]


@pytest.mark.parametrize("name", ["gateway", "worker"])
def test_octavo_leaves_in_order_and_never_all_at_once(name: str) -> None:
    (deployment,) = [each for each in PODS if each["metadata"]["name"] == name]
    assert pods_of(deployment)["terminationGracePeriodSeconds"] > 30, "the grace time that processes take by themselves"
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    (budget,) = [each for each in DOCUMENTS if named(each) == f"PodDisruptionBudget-{name}"]
    assert budget["spec"] == {"maxUnavailable": 1, "selector": {"matchLabels": {"app": name}}}


def test_only_gateways_and_workers_reach_redis() -> None:
    (policy,) = [each for each in DOCUMENTS if named(each) == "NetworkPolicy-redis"]
    (rule,) = policy["spec"]["ingress"]
    (peer,) = rule["from"]
    assert peer["podSelector"]["matchExpressions"] == [
        {"key": "app", "operator": "In", "values": ["gateway", "worker", "batch"]}
    ]
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in policy["spec"]


def test_workers_are_scaled_by_a_metric_that_gateways_have() -> None:
    (scaled,) = [each for each in DOCUMENTS if each["kind"] == "ScaledObject"]
    assert scaled["spec"]["scaleTargetRef"] == {"name": "worker"}
    (worker,) = [each for each in PODS if named(each) == "Deployment-worker"]
    assert "replicas" not in worker["spec"], "an apply would undo what the scaler did"
    (trigger,) = scaled["spec"]["triggers"]
    names = re.findall(r"octavo_\w+", trigger["metadata"]["query"])
    text = (DEPLOY.parent / "gateway" / "gauges.py").read_text()
    assert names == ["octavo_queue_depth"]
    assert all(f'"{name}"' in text for name in names)


def test_images_are_pinned() -> None:
    images = {pods_of(each)["containers"][0]["image"] for each in PODS}
    assert images == {"octavo", "redis:7.4-bookworm", "prom/prometheus:v3.5.0"}
    compose = (DEPLOY / "compose.yaml").read_text()
    assert all(image in compose for image in images)
