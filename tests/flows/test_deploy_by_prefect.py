"""Prefect's own `prefect deploy --all` on prefect.yaml, then `nightjar deploy`: the same, and nothing doubled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from prefect import get_client
from prefect.settings import PREFECT_API_URL

from flows.deploy import deploy
from flows.deployments import Chain, deployments_of, reactions_of

ROOT = Path(__file__).resolve().parents[2]
CHAIN = Chain("quickstart", "quickstart-policy", config="/etc/night.yaml", home="/srv/nightjar", approval_hours=12)


def prefect_deploy() -> None:
    environment = os.environ | {
        "PREFECT_API_URL": str(PREFECT_API_URL.value()),
        "PYTHONPATH": str(ROOT),
        "NIGHTJAR_CONFIG": CHAIN.config,
        "NIGHTJAR_HOME": CHAIN.home,
        "PREFECT_CLI_PROMPT": "false",
    }
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_both_ways_lead_to_the_same() -> None:
    with get_client(sync_client=True) as client:
        deploy(CHAIN)  # for the pools
        ours = {one.full_name: client.read_deployment_by_name(one.full_name) for one in deployments_of(CHAIN)}
        prefect_deploy()
        for name, wanted in ours.items():
            found = client.read_deployment_by_name(name)
            assert found.id == wanted.id
            for part in ("entrypoint", "parameters", "job_variables", "work_pool_name", "concurrency_options"):
                assert getattr(found, part) == getattr(wanted, part), f"{name}: {part}"
            assert found.parameter_openapi_schema == wanted.parameter_openapi_schema, name
            assert [s.schedule.cron for s in found.schedules] == [s.schedule.cron for s in wanted.schedules]
        for reaction in reactions_of(CHAIN):
            for automation in client.read_automations_by_name(reaction.name):
                assert automation.actions[0].parameters == reaction.parameters, reaction.name
        deploy(CHAIN)
        own = f"nightjar {CHAIN.name}:"  # the server is shared with the chains of other tests
        names = sorted(one.name for one in client.read_automations() if one.name.startswith(own))
        assert names == sorted(reaction.name for reaction in reactions_of(CHAIN))
