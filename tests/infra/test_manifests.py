"""infra/: manifests have the shapes that Kubernetes, KubeRay and compose take, the versions of the locks, environment
variables that somebody reads, commands that exist, and no secret."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from locks import lock

from pipelines.cli.options import load
from pipelines.config.run_config import load_config
from pipelines.runners.validate import check

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
KUBERNETES = "1.33"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = dict(line.partition(" ; ")[0].split("==") for name in ("cluster", "airflow") for line in lock(name))
DOCKERFILES = sorted((INFRA / "containers").glob("*.Dockerfile"))
IMAGES = {path.stem for path in DOCKERFILES}
FOREIGN_IMAGES = {"postgres": "15.18-bookworm", "minio/minio": "RELEASE.2025-09-07T16-13-09Z"}
FOREIGN_VARIABLES = {
    *("POSTGRES_USER", "POSTGRES_PASSWORD", "MINIO_ROOT_USER", "MINIO_ROOT_PASSWORD"),
    *("TROUPE_PGPASSWORD", "MLFLOW_PGPASSWORD", "AIRFLOW_PGPASSWORD"),
}
"""Read by those images, and by `databases.sh` in one of them."""
BIN = Path(sys.executable).parent


def documents() -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{path.name}: {document['kind']} {document['metadata']['name']}", document)
        for path in sorted((INFRA / "kuberay").glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
    ]


def compose() -> dict[str, Any]:
    return yaml.safe_load((INFRA / "compose" / "compose.yaml").read_text())


def pod_templates(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            if key in ("template", "submitterPodTemplate") and "containers" in item.get("spec", {}):
                yield item
            else:
                yield from pod_templates(item)
    elif isinstance(value, list):
        for item in value:
            yield from pod_templates(item)


def containers() -> list[dict[str, Any]]:
    return [c for _, document in documents() for t in pod_templates(document) for c in t["spec"]["containers"]]


def ray_clusters() -> list[dict[str, Any]]:
    return [
        document["spec"].get("rayClusterSpec") or document["spec"].get("rayClusterConfig") or document["spec"]
        for _, document in documents()
        if document["apiVersion"] == "ray.io/v1"
    ]


@pytest.mark.parametrize(("name", "document"), documents(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_manifest_has_the_shape_that_its_kind_has(name: str, document: dict[str, Any]) -> None:
    if document["apiVersion"] == "ray.io/v1":
        schema = yaml.safe_load((Path(__file__).parent / "kuberay.yaml").read_text())
        jsonschema.validate(document["spec"], schema[document["kind"]] | {"$defs": schema["$defs"]})
        assert set(document) == {"apiVersion", "kind", "metadata", "spec"}
    else:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    for template in pod_templates(document):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        mounted = {m["name"] for c in template["spec"]["containers"] for m in c.get("volumeMounts", [])}
        assert mounted == {v["name"] for v in template["spec"].get("volumes", [])}


def test_what_manifests_refer_to_by_name_exists() -> None:
    names = {(document["kind"], document["metadata"]["name"]) for _, document in documents()}
    text = "\n".join(path.read_text() for path in (INFRA / "kuberay").glob("*.yaml"))
    for kind, pattern in (
        ("ConfigMap", r"configMap(?:Ref)?: \{name: ([\w-]+)\}"),
        ("ServiceAccount", r"serviceAccountName: ([\w-]+)"),
        ("PersistentVolumeClaim", r"claimName: ([\w-]+)"),
    ):
        assert {(kind, name) for name in re.findall(pattern, text)} <= names
    described = (INFRA / "docs" / "guides" / "cluster.md").read_text()
    secrets = set(re.findall(r"secret(?:Ref: \{name|Name): ([\w-]+)", text))
    assert len(secrets) == 8
    for secret in secrets:
        assert f"kubectl create secret generic {secret}" in described
    assert ("Service", "mlflow") in names, "run configs call it http://mlflow:5000"


def test_compose_has_the_shape_that_compose_files_have() -> None:
    schema = json.loads((Path(__file__).parent / "compose-spec.json").read_text())
    data = compose()
    jsonschema.validate(data, schema)
    services = data["services"]
    for name, service in services.items():
        needed = service.get("depends_on", [])
        assert set(needed) <= set(services), name
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("/"):
                assert source == volume, f"{name}: {volume} is a folder of the machine"
                continue
            place = INFRA / "compose" / source
            assert place.is_file() if source.startswith(".") else source in data["volumes"], f"{name}: {volume}"
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name} is published beyond this machine: there is no login"
        if "build" in service:
            assert (INFRA / "compose" / service["build"]["context"]).resolve() == ROOT
            assert (ROOT / service["build"]["dockerfile"]).is_file()
    hosts = set(re.findall(r"(?:https?://|--address=)([a-z][\w-]*):\d+", json.dumps(data)))
    assert hosts <= set(services) | {"localhost"}, "an address of no service"
    with pytest.raises(jsonschema.ValidationError, match="imge"):
        jsonschema.validate({"services": {"a": {"imge": "x"}}}, schema)


def test_versions_are_those_of_the_locks() -> None:
    assert [cluster["rayVersion"] for cluster in ray_clusters()] == [PINS["ray"]] * 3
    own = {f"troupe-{name}:{PROJECT['project']['version']}" for name in IMAGES}
    foreign = {f"{name}:{tag}" for name, tag in FOREIGN_IMAGES.items()}
    assert {c["image"] for c in containers()} <= own
    assert {s["image"] for s in compose()["services"].values()} <= own | foreign
    for path in DOCKERFILES:
        text = path.read_text()
        (base,) = re.findall(r"^FROM python:(\d+\.\d+)-", text, re.MULTILINE)
        assert PROJECT["project"]["requires-python"].startswith(f">={base},")
        installs = [
            " ".join(line.split()) for line in re.split(r"\n| && ", text.replace("\\\n", " ")) if "pip install" in line
        ]
        *locked, project = installs
        assert all("--require-hashes" in line for line in locked) and project.endswith("--no-build-isolation -e .")
        build, packages = (re.findall(r"-r (infra/locks/\w+\.txt)", line) for line in locked)
        assert build == ["infra/locks/build.txt"] and "--no-build-isolation" in locked[1]
        assert all((ROOT / name).is_file() for name in packages) and len(packages) == 1
        assert f"-t troupe-{path.stem}:{PROJECT['project']['version']} ." in text


def test_an_image_holds_every_package_that_is_installed_and_nothing_that_is_ignored() -> None:
    packages = {pattern.rstrip("*") for pattern in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for path in DOCKERFILES:
        copied = {s for line in re.findall(r"^COPY (.*) \S+$", path.read_text(), re.MULTILINE) for s in line.split()}
        assert packages <= copied, f"{path.name}: pip install -e . fails without {packages - copied}"
        for source in copied:
            assert (ROOT / source).exists(), f"{path.name}: COPY {source}"
            assert any(source == name or source.startswith(f"{name}/") for name in allowed), f"{source} is ignored"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_the_project_installs_from_what_an_image_copies(path: Path, tmp_path: Path) -> None:
    for source, target in re.findall(r"^COPY (.*) (\S+)$", path.read_text(), re.MULTILINE):
        for name in source.split():
            place = tmp_path / (Path(name).name if target == "./" else target)
            place.parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, place)
    build = "import setuptools.build_meta as backend; print(backend.build_editable('.'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert list(tmp_path.glob("troupe_rl-*.whl"))


def test_no_secret_is_written_down(tmp_path: Path) -> None:
    for service in compose()["services"].values():
        for name, value in service.get("environment", {}).items():
            if re.search(r"PASSWORD|SECRET|TOKEN|FERNET", name):
                assert re.fullmatch(r"\$\{\w+:\?.+\}", value), f"{name} is given in the file"
    for container in containers():
        assert not [v["name"] for v in container.get("env", []) if "PASSWORD" in v["name"] or "SECRET" in v["name"]]
    assert "Secret" not in {document["kind"] for _, document in documents()}
    file = tmp_path / "secrets.env"
    make = [INFRA / "compose" / "secrets.sh", file]
    assert subprocess.run(make, check=False, stdout=subprocess.DEVNULL).returncode == 0
    assert file.stat().st_mode & 0o777 == 0o600, "only its owner reads it"
    again = subprocess.run(make, check=False, capture_output=True, text=True)
    assert again.returncode == 1 and "is there" in again.stderr, "running services keep their secrets"
    secrets = dict(line.split("=", 1) for line in file.read_text().splitlines())
    asked = set(re.findall(r"\$\{(\w+):\?", (INFRA / "compose" / "compose.yaml").read_text()))
    assert asked == set(secrets)
    assert len(set(secrets.values())) == len(secrets) and all(len(value) >= 32 for value in secrets.values())
    ignored = subprocess.run(["git", "check-ignore", "infra/compose/.env"], cwd=ROOT, capture_output=True, check=False)
    assert ignored.returncode == 0


def variables() -> set[str]:
    found = {name for service in compose()["services"].values() for name in service.get("environment", {})}
    passed = {s["configMapRef"]["name"] for c in containers() for s in c.get("envFrom", []) if "configMapRef" in s}
    for _, document in documents():
        if document["kind"] == "ConfigMap" and document["metadata"]["name"] in passed:
            found |= set(document["data"])
    found |= {v["name"] for c in containers() for v in c.get("env", [])}
    for path in DOCKERFILES:
        for block in re.findall(r"^ENV ((?:.*\\\n)*.*)$", path.read_text(), re.MULTILINE):
            found |= set(re.findall(r"(\w+)=", block))
    return found


@pytest.mark.test
def test_every_environment_variable_is_read_by_somebody() -> None:
    import mlflow
    import psycopg
    import ray
    from airflow import config_templates

    libpq = {option.envvar.decode() for option in psycopg.pq.Conninfo.get_defaults() if option.envvar}
    airflow = yaml.safe_load((Path(config_templates.__file__).parent / "config.yml").read_text())
    in_mlflow = (Path(mlflow.__file__).parent / "environment_variables.py").read_text()
    private = Path(ray.__file__).parent / "_private"
    in_ray = "".join(p.read_text() for p in (private / "ray_constants.py", *private.glob("authentication/*.py")))
    ours = "".join(
        path.read_text() for folder in ("stores", "pipelines", "dags") for path in (ROOT / folder).rglob("*.py")
    )
    for name in sorted(variables() - FOREIGN_VARIABLES):
        if name.startswith("AIRFLOW__"):
            _, section, key = name.split("__")
            assert key.lower() in airflow[section.lower()]["options"], name
        elif name.startswith("PG"):
            assert name in libpq, name
        elif name.startswith("MLFLOW_"):
            assert f'"{name}"' in in_mlflow, name
        elif name.startswith("AWS_"):
            assert name in S3_VARIABLES, f"{name}: the tests on S3 run without it"
        elif name.startswith("RAY_"):
            assert name in in_ray or name in ours, name
        elif name.startswith("TROUPE_"):
            assert f'"{name}"' in ours, name
        else:
            assert name in {"AIRFLOW_HOME", "HOME", "PYTHONUNBUFFERED"}, name


S3_VARIABLES = {
    "AWS_ENDPOINT_URL",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
}


def test_the_variables_of_s3_are_those_that_the_tests_run_with() -> None:
    import servers

    assert set(servers.S3(1).environment) == S3_VARIABLES


def commands() -> list[list[str]]:
    """Of everything that runs a program of the locks."""
    found = [list(map(str, s["command"])) for s in compose()["services"].values() if s["image"].startswith("troupe-")]
    return found + [list(map(str, c["command"])) for c in containers() if "command" in c]


@pytest.mark.test
def test_every_command_exists_and_knows_its_options() -> None:
    programs = {command[0] for command in commands()}
    assert programs == {"python", "mlflow", "ray", "airflow"}
    assert all((BIN / program).is_file() for program in programs)
    ray_start = subprocess.run([BIN / "ray", "start", "--help"], capture_output=True, text=True, check=True).stdout
    for command in commands():
        if command[0] == "python":
            compile(command[2], "compose.yaml", "exec")
        if command[0] == "ray":
            for option in (part.partition("=")[0] for part in command[2:] if part.startswith("--")):
                assert re.search(rf"(?<![\w-]){option}(?![\w-])", ray_start), f"ray start has no {option}"
    by_compose, by_kubernetes = (sorted(command) for command in commands() if command[0] == "mlflow")
    assert by_compose == by_kubernetes, "tests/infra/test_services.py runs the first"
    parse = "import json, sys\nfrom airflow.cli.cli_parser import get_parser\n"
    parse += "for words in json.load(sys.stdin): get_parser().parse_args(words)"
    airflow = json.dumps([command[1:] for command in commands() if command[0] == "airflow"])
    done = subprocess.run([sys.executable, "-c", parse], input=airflow, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(json.loads(airflow)) == 5


def test_the_run_of_the_rayjob_is_the_demo_but_for_its_places() -> None:
    (job,) = (document["spec"] for _, document in documents() if document["kind"] == "RayJob")
    program, command, config, *sets = shlex.split(job["entrypoint"])
    assert (program, command) == ("troupe", "train")
    assert sets[::2] == ["--set"] * (len(sets) // 2)
    loaded = load(ROOT / config, sets[1::2])
    assert loaded.sha256 == load_config(INFRA / "runs" / "demo.yaml").sha256
    assert loaded.storage.root == "s3://troupe/runs" and loaded.storage.journal and loaded.storage.mlflow


def test_the_nightly_run_of_a_cluster_is_the_demo_on_a_schedule() -> None:
    nightly, demo = load_config(INFRA / "cluster" / "nightly.yaml"), load_config(INFRA / "runs" / "demo.yaml")
    check(nightly)
    assert nightly.schedule is not None and nightly.cluster.folder == "/opt/troupe"
    (wanted,) = nightly.cluster.resources
    assert f'--resources={{"{wanted}": 1000}}' in compose()["services"]["ray-head"]["command"]
    assert "resources" not in str(compose()["services"]["ray-worker"]["command"])
    (standing,) = (document["spec"] for _, document in documents() if document["kind"] == "RayCluster")
    for group in (standing["headGroupSpec"], *standing["workerGroupSpecs"]):
        offered = json.loads(json.loads(group["rayStartParams"].get("resources", '"{}"')))
        starts_jobs = group["template"]["metadata"]["labels"].get("troupe/jobs") == "true"
        assert list(offered) == [wanted] * starts_jobs, "jobs start where the journal's password is, and nowhere else"
    assert nightly.model_copy(update={"run": "demo"}).sha256 == demo.sha256
    assert "WORKDIR /opt/troupe" in (INFRA / "containers" / "cpu.Dockerfile").read_text()


def test_the_serve_config_is_one_that_serve_and_the_policy_app_take() -> None:
    from ray.serve.schema import ServeDeploySchema

    from serve_apps.policy.deployment import PolicyAppSpec, app_entry
    from serve_apps.policy.policy_app import PolicyArgs

    (service,) = (document["spec"] for _, document in documents() if document["kind"] == "RayService")
    given = yaml.safe_load(service["serveConfigV2"])
    ServeDeploySchema.model_validate(given)
    for app in given["applications"]:
        args = PolicyArgs.from_dict(app["args"])
        spec = PolicyAppSpec(name=app["name"], model_group=args.model_group, model=args.model, serve=args.serve)
        assert {**app, "args": args.to_dict()} == app_entry(spec)
