"""What a Prefect server holds of one chain: are its nights deployed, and is a worker there to run them?"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import quote

from configs.credentials import user_and_password
from tasks.prefect_health import credentials

_SECONDS = 10.0
_GONE = 404


def missing_for(url: str, chain: str) -> list[str]:
    """A sentence, with the way out, for each thing that keeps a scheduled night from beginning.

    Raises OSError when the server does not answer. Which workers there are is the server's own view of the last minute.
    """
    deployments = [_ask(url, f"/deployments/name/{flow}/{quote(chain)}") for flow in ("nightly", "train")]
    if deployments[0] is None:
        return [f"nightly/{chain} is not deployed here: run `nightjar deploy CONFIG` if it is to be scheduled"]
    pools = dict.fromkeys(one["work_pool_name"] for one in deployments if one is not None)
    idle = [pool for pool in pools if not _has_worker(url, pool)]
    return [f"no worker of pool {pool} is online: `prefect worker start --pool {pool}`" for pool in idle]


def _has_worker(url: str, pool: str) -> bool:
    found = _ask(url, f"/work_pools/{quote(pool)}/workers/filter", {}) or []
    return any(worker["status"] == "ONLINE" for worker in found)


def _ask(url: str, path: str, content: dict[str, Any] | None = None) -> Any:
    """The reply as it is in JSON; None where there is no such thing. With `content` it is a POST."""
    plain, _ = user_and_password(url.rstrip("/"))
    headers = {"Content-Type": "application/json", **credentials(os.environ)}
    body = None if content is None else json.dumps(content).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(plain + path, body, headers), timeout=_SECONDS) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as refusal:
        if refusal.code == _GONE:
            return None
        raise
