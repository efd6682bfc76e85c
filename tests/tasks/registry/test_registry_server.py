"""The same over a real MLflow server with its artifact proxy, which is also stopped and started in between."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import pytest

from configs.schema import NightConfig
from configs.schema.registry import RegistryConfig
from tasks.candidate import ServingSettings, fetch_champion, register_candidate
from tasks.delivery import deliver_metrics
from tasks.figures import reward_and_kl
from tasks.finish_late import finish_late
from tasks.model_manifest import ModelFiles, hashes
from tasks.promotion import promote
from tasks.reconcile import reconcile
from tasks.registry import CHAMPION, PREVIOUS
from tasks.registry_errors import StoredBytesDiffer, TrackingUnavailable
from tasks.rollback import rollback
from tasks.site import Site
from tasks.tracking import NightRun
from tasks.version_tags import Lineage
from training.recorder import Recorder

pytestmark = pytest.mark.slow
CONFIG = NightConfig.model_validate(
    {
        "data": {"source": "pairs.parquet"},
        "models": {"base": "base"},
        "gates": {"rules": [{"metric": "reward", "min": 0.0}]},
    }
)


@pytest.fixture
def port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_a_night_over_a_server_that_goes_away_and_comes_back(
    start_server: Callable[..., Popen[bytes]],
    port: int,
    tmp_path: Path,
    model_folder: Callable[[int], Path],
    lineage: Lineage,
    monkeypatch: pytest.MonkeyPatch,
    make_site: Callable[..., Site],
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    server_folder = tmp_path / "server"
    server_folder.mkdir()
    server = start_server(server_folder, port, f"127.0.0.1:{port}")
    config = RegistryConfig(tracking_uri=f"http://127.0.0.1:{port}", verify_max_new_tokens=4)
    site = make_site(tmp_path / "home", config)

    night = NightRun.open(site, "n1", CONFIG)
    numbers = []
    for seed in (1, 2, 3):
        files, run = ModelFiles(model_folder(seed)), night.register_run()
        numbers.append(register_candidate(site, files, f"n{seed}", lineage, run, ServingSettings()).number)
    first, second, third = numbers
    promote(site, first, judged_against=None)
    promote(site, second, judged_against=first)
    fetched = fetch_champion(site, tmp_path / "fetched")
    assert fetched is not None
    assert hashes(fetched.files.model) == hashes(model_folder(2))

    weights = [p for p in server_folder.rglob("model.safetensors") if p.read_bytes() == _weights(model_folder(3))]
    weights[0].write_bytes(_weights(model_folder(1)))
    with pytest.raises(StoredBytesDiffer, match=r"model\.safetensors differs"):
        promote(site, third, judged_against=second)

    stage = tmp_path / "stage"
    stage.mkdir()
    recorder = Recorder(stage / "metrics.jsonl")
    recorder.record(1, {"loss": 0.5})
    recorder.close()
    destination = night.destination("reward")
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()
    assert "does not answer" in str(deliver_metrics(stage, destination, final=True).late)
    with pytest.raises(TrackingUnavailable):
        rollback(site, why="the server is away")
    with pytest.raises(TrackingUnavailable):
        night.finish("FAILED")

    start_server(server_folder, port, f"127.0.0.1:{port}")
    assert site.registry.alias(CHAMPION) == second
    assert deliver_metrics(stage, destination, final=True).points == 1
    assert finish_late(site).nights == ["n1"]
    assert site.registry.client.get_run(night.run_id).info.status == "FAILED"
    assert rollback(site, why="it is back").restored == first
    assert site.registry.alias(PREVIOUS) is None
    assert reconcile(site).nothing_to_do
    assert not any((site.home / "scratch").glob("stored-*"))
    shutil.rmtree(server_folder, ignore_errors=True)


def test_the_notes_pictures_are_where_its_addresses_say(
    start_server: Callable[..., Popen[bytes]], port: int, tmp_path: Path, make_site: Callable[..., Site]
) -> None:
    """The note names pictures relative to MLflow's own pages; a browser that reads it must get them."""
    folder = tmp_path / "server"
    folder.mkdir()
    start_server(folder, port, f"127.0.0.1:{port}")
    address = f"http://127.0.0.1:{port}"
    night = NightRun.open(make_site(tmp_path / "home", RegistryConfig(tracking_uri=address)), "n1", CONFIG)
    night.log_figures({"reward_and_kl.png": reward_and_kl({"reward": ([0, 1], [0.0, 1.0])}, {}, None)})
    ((shows, place),) = night.pictures().items()
    with urllib.request.urlopen(f"{address}/{place}", timeout=60) as reply:
        assert (shows, reply.read(8)) == ("reward and kl", b"\x89PNG\r\n\x1a\n")


def _weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()
