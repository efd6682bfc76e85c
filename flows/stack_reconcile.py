"""What a stack that is up again asks of Prefect: that every chain looks for runs whose processes ended with the last.

Such a run looks alive to the server, and for its sake the chain's next night would be cancelled, until the hourly
reconcile.
"""

from __future__ import annotations

import os
from datetime import datetime
from typing import Any

import httpx

from tasks.prefect_health import credentials

_SECONDS = 60.0


def ask_for_reconcile(api: str, workers_since: datetime) -> list[str]:
    """Ask for a run of every `reconcile/<chain>`; the chains, or nothing where the server does not answer.

    `workers_since`: no run that began earlier has a process by starting late.
    """
    try:
        with httpx.Client(base_url=api, timeout=_SECONDS, headers=credentials(os.environ)) as client:
            return [_ask(client, deployment, workers_since) for deployment in _deployments(client)]
    except httpx.HTTPError:
        return []


def _deployments(client: httpx.Client) -> list[dict[str, Any]]:
    reply = client.post("/deployments/filter", json={"flows": {"name": {"any_": ["reconcile"]}}})
    return list(reply.raise_for_status().json())


def _ask(client: httpx.Client, deployment: dict[str, Any], workers_since: datetime) -> str:
    request = deployment["parameters"]["request"] | {"workers_since": workers_since.isoformat()}
    run = {"parameters": {"request": request}, "state": {"type": "SCHEDULED"}}
    client.post(f"/deployments/{deployment['id']}/create_flow_run", json=run).raise_for_status()
    return str(deployment["name"])
