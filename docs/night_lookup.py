"""Where a night's pages are, asked of MLflow's and Prefect's own REST interfaces. Standard library only.

Servers without log-in, as `make stack` and `nightjar ui` run them on loopback.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

NIGHT, STAGE, PARENT = "nightjar.night", "nightjar.stage", "mlflow.parentRunId"
ANSWER_SECONDS = 60.0
# Both servers answer in pages; a home keeps far fewer versions than this.
MOST = 200


@dataclass(frozen=True)
class NightInMlflow:
    """One night's identifiers in MLflow. `ppo`: its nested run; `earlier`: the run of the night before it, if any."""

    name: str
    experiment: str
    run: str
    ppo: str
    model: str
    version: str
    earlier: str | None


@dataclass(frozen=True)
class NightInPrefect:
    """The night's flow run and its summary artifact. `key`: the artifact's name."""

    flow_run: str
    artifact: str
    key: str


@dataclass(frozen=True)
class Addresses:
    """Of the pages, without a slash at the end. Example: http://127.0.0.1:5000 and http://127.0.0.1:4200."""

    mlflow: str
    prefect: str


def stack_addresses(home: Path, environment: Mapping[str, str] = os.environ) -> Addresses:
    """From `<home>/stack/env`, which `make stack` writes, else from the environment. SystemExit where neither says."""
    file = home / "stack" / "env"
    told = {**environment, **(exports(file.read_text(encoding="utf-8")) if file.is_file() else {})}
    missing = [name for name in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL") if not told.get(name)]
    if missing:
        raise SystemExit(f"{file} is not there and {' and '.join(missing)} not set: `make stack`, or set the variables")
    prefect = told["PREFECT_API_URL"].rstrip("/")
    return Addresses(told["MLFLOW_TRACKING_URI"].rstrip("/"), prefect.removesuffix("/api"))


def exports(text: str) -> dict[str, str]:
    """The variables of a file of `export NAME=value` lines. Other lines say nothing."""
    lines = [line.removeprefix("export ") for line in text.splitlines() if line.startswith("export ")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def find_in_mlflow(address: str, name: str | None) -> NightInMlflow:
    """The named night, or the last one that registered a version. Raises SystemExit when there is none."""
    query = {"max_results": MOST} | ({"filter": f"tags.`{NIGHT}` = '{name}'"} if name else {})
    found = ask(f"{address}/api/2.0/mlflow/model-versions/search?{urlencode(query)}").get("model_versions", [])
    version = last_registered(found)
    if version is None:
        raise SystemExit(f"no registered night {name or ''} on {address}; `nightjar status` lists the nights")
    experiment, run = _night_of(address, version["run_id"])
    nested = search_runs(address, experiment, f"tags.`{PARENT}` = '{run['run_id']}'")
    nights = search_runs(address, experiment, f"tags.`{STAGE}` = 'night'")
    return NightInMlflow(
        name=tags_of(version)[NIGHT],
        experiment=experiment,
        run=run["run_id"],
        ppo=next(one["run_id"] for one in nested if one["run_name"] == "ppo"),
        model=version["name"],
        version=version["version"],
        earlier=night_before(nights, run),
    )


def last_registered(versions: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The newest of the versions that name a night."""
    named = [version for version in versions if NIGHT in tags_of(version)]
    return max(named, key=lambda version: int(version["creation_timestamp"]), default=None)


def night_before(nights: Sequence[Mapping[str, Any]], night: Mapping[str, Any]) -> str | None:
    """The run of the last night that began before this one."""
    older = [run for run in nights if int(run["start_time"]) < int(night["start_time"])]
    return max(older, key=lambda run: int(run["start_time"]))["run_id"] if older else None


def tags_of(entity: Mapping[str, Any]) -> dict[str, str]:
    """MLflow's list of key and value as a mapping."""
    return {tag["key"]: tag["value"] for tag in entity.get("tags", [])}


def search_runs(address: str, experiment: str, condition: str) -> list[dict[str, Any]]:
    """The `info` of the runs of an experiment that meet a condition, the last begun first."""
    query = {"experiment_ids": [experiment], "filter": condition, "max_results": MOST}
    return [run["info"] for run in ask(f"{address}/api/2.0/mlflow/runs/search", query).get("runs", [])]


def find_in_prefect(address: str, night: str) -> NightInPrefect:
    """The last summary of the night. Raises SystemExit when the server has none."""
    key = f"{night.lower().replace('_', '-').replace('.', '-')}-summary"
    query = {"artifacts": {"key": {"any_": [key]}}, "sort": "CREATED_DESC", "limit": 1}
    found = ask(f"{address}/api/artifacts/filter", query)
    if not found:
        raise SystemExit(f"no artifact {key} on {address}; did the night run on another Prefect server?")
    return NightInPrefect(found[0]["flow_run_id"], found[0]["id"], key)


def ask(url: str, query: Mapping[str, Any] | None = None) -> Any:
    """The answer to GET, or to POST with a query. Raises SystemExit with the server's words when it refuses."""
    data = None if query is None else json.dumps(query).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{url} answers {error.code}: {error.read().decode(errors='replace')[:500]}") from None
    except OSError as error:
        raise SystemExit(f"{url} does not answer ({error}); is the server up?") from None


def _night_of(address: str, registering: str) -> tuple[str, dict[str, Any]]:
    """Experiment and `info` of the night's run, which is the parent of the one that registered the version."""
    nested = _run(address, registering)
    night = _run(address, tags_of(nested["data"])[PARENT])
    return night["info"]["experiment_id"], night["info"]


def _run(address: str, run: str) -> dict[str, Any]:
    return dict(ask(f"{address}/api/2.0/mlflow/runs/get?{urlencode({'run_id': run})}")["run"])
