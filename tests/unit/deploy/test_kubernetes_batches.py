"""What deploy/k8s-batches adds: a worker of batches, and one folder for it and gateways. Needs no cluster."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.unit.deploy.test_kubernetes import (
    DEPLOY,
    DOCUMENTS,
    PODS,
    VERSION,
    named,
    pods_of,
    test_pods_are_restricted_and_watched,
)

FOLDER = DEPLOY / "k8s-batches"
COMPONENT: dict[str, Any] = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
ADDED: list[dict[str, Any]] = list(yaml.safe_load_all((FOLDER / "batch.yaml").read_text()))
PATCH: dict[str, Any] = yaml.safe_load((FOLDER / "gateway.yaml").read_text())
(BATCH,) = [each for each in ADDED if named(each) == "Deployment-batch"]


def test_every_file_is_applied_once_the_line_is_taken_in() -> None:
    assert COMPONENT["kind"] == "Component"
    assert COMPONENT["resources"] == ["batch.yaml"]
    assert COMPONENT["patches"] == [{"path": "gateway.yaml"}]
    assert {path.name for path in FOLDER.iterdir()} == {"kustomization.yaml", "batch.yaml", "gateway.yaml"}
    text = (DEPLOY / "kustomization.yaml").read_text()
    assert "\n# components: [k8s-batches]\n" in text
    assert yaml.safe_load(text.replace("# components", "components"))["components"] == [FOLDER.name]


@pytest.mark.parametrize("document", ADDED, ids=named)
def test_kubernetes_knows_every_field(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, VERSION, strict=True)


def test_it_is_as_restricted_as_the_others() -> None:
    test_pods_are_restricted_and_watched(BATCH)
    assert (
        BATCH["spec"]["selector"]["matchLabels"] == BATCH["spec"]["template"]["metadata"]["labels"] == {"app": "batch"}
    )
    assert pods_of(BATCH)["terminationGracePeriodSeconds"] == 15


def test_gateways_and_the_worker_of_batches_share_a_folder_that_both_may_write_to() -> None:
    (claim,) = [each for each in ADDED if each["kind"] == "PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    (gateway,) = [each for each in PODS if named(each) == named(PATCH)]
    (patched,), (container,) = pods_of(PATCH)["containers"], pods_of(gateway)["containers"]
    assert patched["name"] == container["name"]
    volume = {"name": "batches", "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}
    for pods in (pods_of(PATCH), pods_of(BATCH)):
        (each,) = pods["containers"]
        (folder,) = [variable["value"] for variable in each["env"] if variable["name"] == "OCTAVO_BATCHES"]
        assert {"name": "batches", "mountPath": folder} in each["volumeMounts"]
        assert volume in pods["volumes"]
        assert pods["securityContext"]["fsGroup"] == pods_of(BATCH)["securityContext"]["runAsGroup"]
    assert pods_of(gateway)["securityContext"]["runAsGroup"] == pods_of(BATCH)["securityContext"]["runAsGroup"]


def test_it_does_what_composes_worker_of_batches_does() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["batch"]
    (container,) = pods_of(BATCH)["containers"]
    assert container["args"] == compose["command"]
    assert {each["name"]: each["value"] for each in container["env"]} == compose["environment"]
    assert container["livenessProbe"]["exec"]["command"] == compose["healthcheck"]["test"][1:]


def test_it_reaches_redis_and_gateways_and_nothing_reaches_it() -> None:
    (policy,) = [each for each in ADDED if each["kind"] == "NetworkPolicy"]
    assert policy["spec"]["podSelector"] == {"matchLabels": {"app": "batch"}}
    assert "ingress" not in policy["spec"]
    reached = {
        peer["podSelector"]["matchLabels"]["app"]: [port["port"] for port in rule["ports"]]
        for rule in policy["spec"]["egress"]
        for peer in rule["to"]
        if "podSelector" in peer
    }
    assert reached == {"redis": [6379], "gateway": [50051]}
    (redis,) = [each for each in DOCUMENTS if named(each) == "NetworkPolicy-redis"]
    assert "batch" in str(redis["spec"]["ingress"])
