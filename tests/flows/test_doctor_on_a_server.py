"""`nightjar doctor` on a real Prefect server: are the chain's nights deployed, and is a worker there?"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.settings import PREFECT_API_URL

from configs.schema import load_config
from flows.deploy import deploy
from flows.deployments import Chain
from tasks.doctor import Finding, examine

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"


@pytest.fixture
def client() -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as made:
        yield made


def prefect_of(chain: str, home: Path) -> Finding:
    findings = examine(home, load_config(QUICKSTART, [f"name={chain}"]))
    (finding,) = [finding for finding in findings if finding.about == "prefect"]
    return finding


def test_a_chain_wants_its_deployment_and_workers(client: SyncPrefectClient, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", str(PREFECT_API_URL.value()))
    chain = f"doctor-{uuid.uuid4().hex[:8]}"
    fresh = prefect_of(chain, tmp_path)
    assert fresh.health == "look"
    assert f"nightly/{chain} is not deployed" in fresh.sentence

    deploy(Chain(chain, "p", config="/c.yaml", home=str(tmp_path)))
    try:
        assert "no worker of pool cpu is online" in prefect_of(chain, tmp_path).sentence
        for pool in ("cpu", "gpu"):
            client.send_worker_heartbeat(work_pool_name=pool, worker_name=f"of {chain}")
        manned = prefect_of(chain, tmp_path)
        assert (manned.health, "no worker" in manned.sentence) == ("good", False)
    finally:
        for flow in ("nightly", "train", "watch", "approve", "rollback", "reconcile"):
            client.delete_deployment(client.read_deployment_by_name(f"{flow}/{chain}").id)
