"""infra/kuberay and infra/compose give a pod what its role needs, and no more: rights, files, network, secrets."""

from __future__ import annotations

from typing import Any

import pytest
from test_manifests import INFRA, compose, documents, pod_templates

pytestmark = pytest.mark.fast

HARDENED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
SECRETS = {
    "mlflow": {"mlflow-database", "mlflow-bucket", "mlflow-admin"},
    "jobs": {"troupe-bucket", "troupe-journal", "troupe-mlflow"},
    "node": {"troupe-bucket"},
    "autoscaler": {"troupe-bucket"},
    "production": {"troupe-weights"},
    "submitter": set(),
}
"""Role -> the secrets that its pods get. Of those that start no run's driver, none has a password of the database or of MLflow."""


def pods() -> list[tuple[str, dict[str, Any]]]:
    """Every pod template of the manifests, by the document it stands in."""
    return [(name, template) for name, document in documents() for template in pod_templates(document)]


def role(labels: dict[str, str]) -> str:
    if labels.get("app") == "mlflow":
        return "mlflow"
    if labels["troupe/node"] == "submitter":
        return "submitter"
    if labels["troupe/cluster"] == "production":
        return "production"
    if labels == {"troupe/cluster": "standing", "troupe/node": "head"}:
        return "autoscaler"
    return "jobs" if labels.get("troupe/jobs") == "true" else "node"


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [document for _, document in documents() if document["kind"] == kind]


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a label selector matches; of expressions the manifests have `Exists` alone."""
    expressions = selector.get("matchExpressions", [])
    assert all(expression["operator"] == "Exists" for expression in expressions)
    matched = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    return matched and all(expression["key"] in labels for expression in expressions)


@pytest.mark.parametrize(("name", "template"), pods(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_pod_has_no_rights_that_it_does_not_need(name: str, template: dict[str, Any]) -> None:
    spec = template["spec"]
    assert spec["securityContext"] == {
        **{"runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert spec["serviceAccountName"] in {document["metadata"]["name"] for document in of_kind("ServiceAccount")}
    is_autoscaling = spec["serviceAccountName"] == "troupe-autoscaler"
    assert spec["automountServiceAccountToken"] is is_autoscaling
    assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & set(spec)
    for container in spec["containers"]:
        assert container["securityContext"] == HARDENED
        assert set(container["resources"]["requests"]) >= {"cpu", "memory"}
        assert set(container["resources"]["limits"]) >= {"cpu", "memory"}
        assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}, "the root is read-only"


@pytest.mark.parametrize(("name", "template"), pods(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_scratch_disk_has_a_size_and_no_pod_mounts_the_nodes(name: str, template: dict[str, Any]) -> None:
    for volume in template["spec"]["volumes"]:
        assert set(volume) - {"name"} <= {"emptyDir", "persistentVolumeClaim", "configMap"}
        if "emptyDir" in volume:
            assert volume["emptyDir"]["sizeLimit"].endswith("Gi")
        if volume["name"] == "shared-memory":
            (container,) = template["spec"]["containers"]
            memory = int(container["resources"]["limits"]["memory"].removesuffix("Gi"))
            assert int(volume["emptyDir"]["sizeLimit"].removesuffix("Gi")) <= 0.4 * memory, "it counts as memory"


@pytest.mark.parametrize(("name", "template"), pods(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_pod_has_the_secrets_of_its_role(name: str, template: dict[str, Any]) -> None:
    labels = template["metadata"]["labels"]
    for container in template["spec"]["containers"]:
        sources = container.get("envFrom", [])
        assert {s["secretRef"]["name"] for s in sources if "secretRef" in s} == SECRETS[role(labels)]
        has_database = "troupe-database" in {s["configMapRef"]["name"] for s in sources if "configMapRef" in s}
        assert has_database == (role(labels) in ("jobs", "mlflow"))


def test_all_is_in_one_namespace_which_refuses_pods_that_are_not_hardened() -> None:
    (namespace,) = of_kind("Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    others = [document for _, document in documents() if document["kind"] != "Namespace"]
    assert {document["metadata"]["namespace"] for document in others} == {namespace["metadata"]["name"]}
    assert all(document["automountServiceAccountToken"] is False for document in of_kind("ServiceAccount"))
    for cluster in of_kind("RayCluster"):
        assert cluster["spec"]["autoscalerOptions"]["securityContext"] == HARDENED, "KubeRay adds this container"
    assert all("submitterPodTemplate" in job["spec"] for job in of_kind("RayJob")), "KubeRay's own is not hardened"


def test_what_no_policy_names_is_refused() -> None:
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in of_kind("NetworkPolicy")}
    assert policies.pop("refuse-all") == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for spec in policies.values():
        assert {kind.lower() for kind in spec["policyTypes"]} == {"ingress", "egress"} & set(spec)
        for rule in [*spec.get("ingress", []), *spec.get("egress", [])]:
            peers = rule.get("from") or rule.get("to")
            assert peers and all(peers), "an empty list or peer means everybody"
            for peer in peers:
                is_own_cluster = set(peer) == {"podSelector"} and "troupe/cluster" in peer["podSelector"]["matchLabels"]
                assert is_own_cluster or rule["ports"], "all ports are open within a Ray cluster only"
                if "ipBlock" in peer:
                    assert "169.254.0.0/16" in peer["ipBlock"]["except"], "a node's credentials are had there"


@pytest.mark.parametrize(("name", "template"), pods(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_pod_reaches_what_its_role_needs_and_nothing_else(name: str, template: dict[str, Any]) -> None:
    labels = template["metadata"]["labels"]
    mine = [p["spec"] for p in of_kind("NetworkPolicy") if selects(p["spec"]["podSelector"], labels)]
    ports = {port["port"] for spec in mine for rule in spec.get("egress", []) for port in rule.get("ports", [])}
    expected = {"mlflow": {53, 443, 5432}, "jobs": {53, 443, 5432, 5000}, "node": {53, 443}, "production": {53, 443}}
    assert ports == ({**expected, "submitter": {53, 8265}, "autoscaler": {53, 443, 6443}})[role(labels)]
    whole = [rule for spec in mine for rule in spec.get("egress", []) if "ports" not in rule]
    peers = [peer["podSelector"]["matchLabels"] for rule in whole for peer in rule["to"]]
    assert peers == ([{"troupe/cluster": labels["troupe/cluster"]}] if "troupe/cluster" in labels else [])


def test_mlflow_is_reached_by_runs_alone_and_asks_for_a_login() -> None:
    specs = [p["spec"] for p in of_kind("NetworkPolicy") if selects(p["spec"]["podSelector"], {"app": "mlflow"})]
    (rule,) = (rule for spec in specs for rule in spec.get("ingress", []))
    assert rule == {"from": [{"podSelector": {"matchLabels": {"troupe/jobs": "true"}}}], "ports": [{"port": 5000}]}
    (pod,) = (template["spec"] for _, template in pods() if role(template["metadata"]["labels"]) == "mlflow")
    login = next(d["data"] for d in of_kind("ConfigMap") if d["metadata"]["name"] == "mlflow-login")
    assert login == {"basic_auth.ini": (INFRA / "compose" / "basic_auth.ini").read_text()}
    for command in (pod["containers"][0]["command"], compose()["services"]["mlflow"]["command"]):
        assert "--app-name=basic-auth" in command


def test_a_drained_node_takes_neither_a_head_nor_the_last_engine() -> None:
    """A budget for pods of KubeRay may hold a number, and no share: it has nothing that says how many there are."""
    budgets = [budget["spec"] for budget in of_kind("PodDisruptionBudget")]
    assert all(budget["minAvailable"] == 1 and "maxUnavailable" not in budget for budget in budgets)
    for name, template in pods():
        labels = template["metadata"]["labels"]
        is_kept = any(selects(budget["selector"], labels) for budget in budgets)
        is_needed = labels.get("troupe/node") == "head" or role(labels) == "production"
        assert is_kept == is_needed, name


def test_services_of_compose_are_hardened_too() -> None:
    services = compose()["services"]
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"], name
        assert service["read_only"] is (name != "s3"), name
        assert not {"privileged", "network_mode", "pid", "cap_add"} & set(service), name
        assert set(service["networks"]) <= set(compose()["networks"])
    assert compose()["networks"]["storage"] == {"internal": True}, "databases and buckets reach nobody outside"
    assert services["postgres"]["networks"] == services["s3"]["networks"] == ["storage"]
    users = {name: service["environment"].get("PGUSER") for name, service in services.items()}
    assert {users["ray-head"], users["mlflow"], users["airflow-scheduler"]} == {"troupe", "mlflow", "airflow"}
    airflow = services["airflow-scheduler"]["environment"]
    assert not [name for name in airflow if name.startswith(("AWS_", "MLFLOW_"))], (
        "it needs neither bucket nor registry"
    )


def test_every_file_of_the_manifests_is_read_by_these_tests() -> None:
    parsed = {name.partition(":")[0] for name, _ in documents()}
    assert parsed == {path.name for path in (INFRA / "kuberay").iterdir()}
