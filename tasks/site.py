"""One registered model as seen from one home: its registry, journal and lock, and how a version is proved sound."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from configs.schema.registry import RegistryConfig
from tasks.journal import Journal
from tasks.locks import held_lock, model_lock_path
from tasks.mlflow_client import tracking_uri_of
from tasks.model_manifest import check_unchanged
from tasks.registry import ModelRegistry, Version, answering
from tasks.registry_errors import StoredBytesDiffer
from tasks.serving import ServingWorker
from tasks.version_tags import TREE
from training.contract import read_json, write_json


@dataclass(frozen=True)
class Site:
    """Everything that promotion, rollback, reconcile and retention share."""

    home: Path
    config: RegistryConfig
    tracking_uri: str
    registry: ModelRegistry
    journal: Journal
    shared: ServingWorker | None = None

    @classmethod
    def open(cls, home: Path, config: RegistryConfig) -> Site:
        """Nothing is contacted yet."""
        uri = tracking_uri_of(home, config.tracking_uri)
        return cls(home, config, uri, ModelRegistry(config.model, uri), Journal(home))

    @property
    def model(self) -> str:
        """Name of the registered model."""
        return self.config.model

    @contextmanager
    def locked(self, purpose: str) -> Iterator[None]:
        """Alone with this model, as far as processes with this home go. Raises LockHeld."""
        with held_lock(model_lock_path(self.home, self.model), purpose, self.config.lock_wait_seconds):
            yield

    @contextmanager
    def worker(self) -> Iterator[ServingWorker]:
        """A serving child: the one that `warm` started, while it lives, or a new one that ends with the block."""
        if self.shared is not None and self.shared.alive:
            yield self.shared
            return
        with self._new_worker() as fresh:
            yield fresh

    @contextmanager
    def warm(self) -> Iterator[Site]:
        """This site with one serving child for all acts of the block: starting one costs more than most acts do.

        The child dies with the thread that enters the block (the kernel's parent-death signal counts threads).
        """
        with self._new_worker() as worker:
            yield replace(self, shared=worker)

    def _new_worker(self) -> ServingWorker:
        return ServingWorker(self.tracking_uri, self.home / "scratch", self.config.verify_timeout_minutes * 60)

    @contextmanager
    def stored(self, version: Version) -> Iterator[Path]:
        """The folder with everything stored for a version: in place where the store is a local folder, else fetched."""
        with answering(self.tracking_uri):
            place = self.registry.client.get_model_version_download_uri(self.model, version.number)
        if urlsplit(place).scheme in ("", "file"):
            yield Path(unquote(urlsplit(place).path))
            return
        (self.home / "scratch").mkdir(parents=True, exist_ok=True)
        fetched = Path(tempfile.mkdtemp(prefix="stored-", dir=self.home / "scratch"))
        try:
            yield fetch(self, place, fetched)
        finally:
            shutil.rmtree(fetched, ignore_errors=True)

    @contextmanager
    def unchanged(self, version: Version) -> Iterator[Path]:
        """`stored`, after checking that every byte is as it was right after the upload. Raises StoredBytesDiffer."""
        expected = version.tags.get(TREE)
        if not expected:
            raise StoredBytesDiffer(
                f"version {version.number} of {self.model} carries no {TREE}: its upload was never verified",
                "only versions that a night registered can be promoted; run the night again",
            )
        with self.stored(version) as folder:
            check_unchanged(folder, expected, self._remembered(version.number))
            yield folder

    def remember(self, number: str, files: dict[str, str]) -> None:
        """Keep the file hashes of a version, so that a later difference can be named."""
        path = self._memory(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, files)

    def _remembered(self, number: str) -> dict[str, str] | None:
        path = self._memory(number)
        return dict(read_json(path)) if path.is_file() else None

    def _memory(self, number: str) -> Path:
        return self.home / "versions" / self.model.replace(" ", "_") / f"{number}.json"


def fetch(site: Site, place: str, destination: Path) -> Path:
    """Download the artifact folder at `place` into `destination`."""
    from mlflow.artifacts import download_artifacts

    with answering(site.tracking_uri):
        return Path(download_artifacts(place, dst_path=str(destination), tracking_uri=site.tracking_uri))
