"""compose.yaml: parsed by docker-compose where there is one, and held to what docker/README.md promises."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
COMMAND = "NIGHTJAR_DOCKER_COMPOSE"
"""Environment variable: a docker-compose that is not on PATH."""


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return compose["services"]


def docker_compose() -> list[str] | None:
    found = os.environ.get(COMMAND) or shutil.which("docker-compose")
    if found:
        return [found]
    docker = shutil.which("docker")
    if docker and subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode == 0:
        return [docker, "compose"]
    return None


def config(**environment: str) -> subprocess.CompletedProcess[str]:
    command = docker_compose()
    if command is None:
        pytest.skip("neither docker-compose (Debian: apt install docker-compose) nor docker compose is here")
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    return subprocess.run(
        [*command, "-f", str(DOCKER / "compose.yaml"), "config"], env=kept | environment, capture_output=True,
        text=True, timeout=120, check=False, cwd=DOCKER,
    )  # fmt: skip


def test_docker_compose_accepts_it() -> None:
    done = config(POSTGRES_PASSWORD="pa55", MLFLOW_ARTIFACTS_DESTINATION="s3://bucket/prefix", AWS_ACCESS_KEY_ID="key")
    assert done.returncode == 0, done.stderr
    read = yaml.safe_load(done.stdout)["services"]
    mlflow = read["mlflow"]
    assert "--artifacts-destination=s3://bucket/prefix" in mlflow["command"]
    assert mlflow["environment"]["AWS_ACCESS_KEY_ID"] == "key"
    assert (
        mlflow["environment"]["MLFLOW_BACKEND_STORE_URI"] == "postgresql+psycopg2://nightjar:pa55@postgres:5432/mlflow"
    )


def test_no_log_in_is_no_variable_since_an_empty_one_switches_it_on() -> None:
    """Prefect asks for a log-in as soon as the variable is there; its client sends none for an empty string."""
    asks, says = "PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"
    open_to_all = yaml.safe_load(config(POSTGRES_PASSWORD="pa55").stdout)["services"]
    assert not [name for name, service in open_to_all.items() if given(service, asks) or given(service, says)]
    assert "" not in [given(service, key) for service in open_to_all.values() for key in (asks, says)]
    closed = yaml.safe_load(config(POSTGRES_PASSWORD="pa55", **{asks: "a:b", says: "a:b"}).stdout)["services"]
    assert given(closed["prefect"], asks) == "a:b"
    assert {given(closed[name], says) for name in ("worker-cpu", "worker-gpu", "deploy")} == {"a:b"}


def given(service: dict[str, Any], variable: str) -> str | None:
    """What a container gets: null in the file and absent here is absent there."""
    return (service.get("environment") or {}).get(variable)


def test_docker_compose_refuses_to_start_without_a_password() -> None:
    done = config()
    assert done.returncode != 0
    assert "set it in docker/.env" in done.stderr


def test_every_service_is_pinned_and_looked_after(services: dict[str, dict[str, Any]]) -> None:
    assert set(services) == {"postgres", "prefect", "mlflow", "worker-cpu", "worker-gpu", "deploy"}
    for name, service in services.items():
        assert re.fullmatch(r"[a-z-]+:\d+\.\d+[\w.-]*", service["image"]), f"{name}: {service['image']}"
        healthy = "healthcheck" in service or "HEALTHCHECK" in dockerfile_of(service)
        assert healthy, f"{name} has no health check"
        assert service.get("privileged") is not True
        if name != "deploy":
            assert service["restart"] == "unless-stopped", name


def dockerfile_of(service: dict[str, Any]) -> str:
    return (ROOT / service["build"]["dockerfile"]).read_text(encoding="utf-8")


def test_what_is_published_is_on_loopback(services: dict[str, dict[str, Any]]) -> None:
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert sorted(published) == ["127.0.0.1:4200:4200", "127.0.0.1:5000:5000"]
    assert "network_mode" not in str(services)


def test_no_password_is_written_down_or_on_a_command_line(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        assert "PASSWORD" not in str(service.get("command", "")), name
        for key, value in (service.get("environment") or {}).items():
            if re.search(r"PASSWORD|SECRET|AUTH_STRING|DATABASE_CONNECTION|STORE_URI", key):
                assert value is None or "${" in value or "INITDB" in key, f"{name}: {key}"
    assert ".env" in (DOCKER / ".gitignore").read_text(encoding="utf-8").splitlines()


def test_workers_meet_in_one_home_and_speak_to_the_servers(services: dict[str, dict[str, Any]]) -> None:
    for name in ("worker-cpu", "worker-gpu", "deploy"):
        service = services[name]
        assert "home:/var/lib/nightjar" in service["volumes"], name
        assert service["environment"]["PREFECT_API_URL"] == "http://prefect:4200/api"
        assert service["environment"]["MLFLOW_TRACKING_URI"] == "http://mlflow:5000"
        assert set(service["depends_on"]) == {"prefect", "mlflow"}
    allowed = next(part for part in services["mlflow"]["command"] if part.startswith("--allowed-hosts="))
    assert "mlflow:5000" in allowed, "MLflow refuses hosts that are not named with their port"


def test_the_gpu_worker_reserves_devices(services: dict[str, dict[str, Any]]) -> None:
    (device,) = services["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert "deploy" not in services["worker-cpu"]


def test_what_is_mounted_and_mentioned_exists(compose: dict[str, Any]) -> None:
    assert (DOCKER / "initdb/databases.sql").read_text(encoding="utf-8").count("CREATE DATABASE") == 2
    text = (DOCKER / "compose.yaml").read_text(encoding="utf-8")
    offered = (DOCKER / "env.example").read_text(encoding="utf-8")
    passed_on = {
        variable
        for service in compose["services"].values()
        for variable, value in (service.get("environment") or {}).items()
        if value is None
    }
    for variable in sorted(set(re.findall(r"\$\{(\w+)", text)) | passed_on):
        assert f"{variable}=" in offered, f"env.example does not name {variable}"
    used = {name.partition(":")[0] for service in compose["services"].values() for name in service.get("volumes", [])}
    assert {name for name in used if not name.startswith((".", "$"))} == set(compose["volumes"])
