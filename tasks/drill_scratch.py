"""The registry of a drill: a home of its own in a temporary folder, a model name that nobody uses, and its removal."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.credentials import without_credentials
from configs.errors import NightjarError
from configs.schema.registry import RegistryConfig
from tasks.candidate import RegisterRun, ServingSettings, register_candidate
from tasks.drill_model import write_drill_model
from tasks.launch_plan import ROOT
from tasks.mlflow_client import DATABASE
from tasks.model_manifest import ModelFiles, stored_folder
from tasks.process_tree import end_processes, start_child
from tasks.registry import CHAMPION, Version, answering
from tasks.run_lookup import experiment_of
from tasks.site import Site
from tasks.version_tags import Lineage

SERVER = "MLFLOW_TRACKING_URI"
_LINEAGE = Lineage(verdict="PASS", data_sha256="0" * 64, config_hash="0" * 64, code_version="drill")
_WEIGHTS = "model.safetensors"
_PROMPTS = ("who are you?", "what is 2 + 3?")
_NEW_TOKENS = 8


@dataclass
class Scratch:
    """What the steps of a drill share. `good` and `bad` are version numbers, `answers` those of the good one, `why`
    the reason for which the bad one is taken down; `reached`: MLflow has answered, so there may be something to remove
    on the server."""

    site: Site
    on_server: bool
    good: str = ""
    bad: str = ""
    answers: tuple[str, ...] = ()
    why: str = ""
    reached: bool = False

    @classmethod
    def make(cls, on_server: bool) -> Scratch:
        """A fresh home; nothing is contacted yet. Raises NightjarError when a server is wanted and none is named."""
        if on_server and not os.environ.get(SERVER):
            raise NightjarError(f"{SERVER} names no server", f"set {SERVER}, or leave --server out to drill on SQLite")
        name = f"nightjar-drill-{uuid.uuid4().hex[:8]}"
        home = Path(tempfile.mkdtemp(prefix=f"{name}-")).resolve()
        # Named outright, since the variable would otherwise win over the database in the home.
        uri = None if on_server else f"sqlite:///{home / DATABASE}"
        config = RegistryConfig(
            model=name, experiment=name, tracking_uri=uri, verify_prompts=list(_PROMPTS),
            verify_max_new_tokens=_NEW_TOKENS,
        )
        return cls(Site.open(home, config), on_server)

    @property
    def home(self) -> Path:
        """The scratch home."""
        return self.site.home

    @property
    def champion(self) -> str | None:
        """Whom the alias names now, asked of the registry."""
        return self.site.registry.alias(CHAMPION)

    def events(self) -> list[str]:
        """The journal's events, oldest first, read from its file."""
        return [entry.event for entry in self.site.journal.entries(self.site.model)]

    def ask(self) -> tuple[str, ...]:
        """What the champion answers, loaded through its alias."""
        with self.site.worker() as worker:
            return worker.answer(f"models:/{self.site.model}@{CHAMPION}", _PROMPTS, _NEW_TOKENS).texts

    def register(self, seed: int, *, silent: bool = False) -> Version:
        """Write a tiny model and register it as a night would."""
        files = ModelFiles(write_drill_model(self.home / "models" / str(seed), seed, silent=silent))
        run = RegisterRun(experiment_of(self.site), {})
        settings = ServingSettings(max_new_tokens=_NEW_TOKENS, chat_template="none")
        return register_candidate(self.site, files, f"drill-{seed}", _LINEAGE, run, settings)

    def change_a_byte(self, version: Version) -> None:
        """Spoil the stored weights of a version behind everybody's back, wherever the artifacts lie."""
        with self.site.stored(version) as stored:
            folder = stored_folder(stored, "model")
            content = bytearray((folder / _WEIGHTS).read_bytes())
            inside = folder.relative_to(stored).as_posix()
        content[-1] ^= 1
        changed = self.home / "changed" / _WEIGHTS
        changed.parent.mkdir(exist_ok=True)
        changed.write_bytes(content)
        with answering(self.site.tracking_uri):
            place = self.site.registry.client.get_model_version_download_uri(self.site.model, version.number)
            _artifacts(place, self.site.tracking_uri).log_artifact(str(changed), inside)

    def killed_promotion(self, candidate: str, judged_against: str) -> int:
        """Promote in a process of its own that is killed after moving the alias; its exit status."""
        config = self.site.config.model_dump_json()
        arguments = [str(self.home), config, candidate, judged_against]
        child = _start([sys.executable, "-m", "tasks.drill_child", *arguments], self.home)
        try:
            return child.wait(self.site.config.verify_timeout_minutes * 60)
        finally:
            end_processes(self.home)

    def running_runs(self) -> int:
        """MLflow runs of the drill that are still shown as running."""
        with answering(self.site.tracking_uri):
            experiment = experiment_of(self.site)
            return len(self.site.registry.client.search_runs([experiment], "attributes.status = 'RUNNING'"))

    def remove(self) -> str:
        """Take everything away again, and say what is gone. Raises NightjarError naming what is left."""
        try:
            end_processes(self.home)
            told = _remove_from_server(self.site) if self.on_server and self.reached else "database"
        finally:
            shutil.rmtree(self.home, ignore_errors=True)
        if self.home.exists():
            raise NightjarError(f"{self.home} could not be removed", "remove the folder by hand")
        return f"{told}, models, journal and folder are gone"


def _start(command: Sequence[str], home: Path) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return start_child(command, home, home / "killed.txt", {**os.environ, "PYTHONPATH": path})


def _remove_from_server(site: Site) -> str:
    """Versions, model, runs, experiment and their files. MLflow keeps rows of deleted runs until `mlflow gc`."""
    client, uri = site.registry.client, site.tracking_uri
    with answering(uri):
        experiment = client.get_experiment_by_name(site.config.experiment)
    if experiment is None:
        return "nothing had been made on the server;"
    versions = site.registry.versions()
    for version in versions:
        site.registry.delete_version(version)
    with answering(uri):
        if versions:
            client.delete_registered_model(site.model)
        for run in client.search_runs([experiment.experiment_id]):
            client.delete_run(run.info.run_id)
        client.delete_experiment(experiment.experiment_id)
        _artifacts(experiment.artifact_location, uri).delete_artifacts()
    return f"{len(versions)} versions, model and experiment at {without_credentials(uri)} (runs: until `mlflow gc`)"


def _artifacts(place: str, tracking_uri: str) -> Any:
    """MLflow's access to the files at `place`, wherever that is."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    return get_artifact_repository(place, tracking_uri=tracking_uri)
