"""From files on disk to a verified, registered challenger; and from a registered version back to files."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.model_manifest import ModelFiles, check_folder, check_upload, has_role, hashes, stored_folder, whole_sha256
from tasks.registry import CHALLENGER, Version
from tasks.registry_errors import StoredBytesDiffer
from tasks.site import Site
from tasks.version_tags import DIGEST, NIGHT, TREE, Lineage
from training.contract import file_ref

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServingSettings:
    """How a version answers: limits in tokens and the template, as in `models:` of the night's config."""

    max_prompt_length: int | None = None
    max_new_tokens: int = 256
    chat_template: str = "auto"

    def stored(self) -> Mapping[str, Any]:
        """What is kept with the version."""
        return {"max_prompt_length": self.max_prompt_length, "chat_template": self.chat_template}


@dataclass(frozen=True)
class RegisterRun:
    """The short run that logs the version: that of `run_id`, or a new one whose tags tie it to the night's run."""

    experiment_id: str
    tags: Mapping[str, str]
    run_id: str | None = None


@dataclass(frozen=True)
class FetchedVersion:
    """A version as files: for warm starts and for the evaluation."""

    version: str
    digest: str
    files: ModelFiles


def register_candidate(
    site: Site, files: ModelFiles, night: str, lineage: Lineage, run: RegisterRun, settings: ServingSettings
) -> Version:
    """Log `files` as a new version, read everything back and compare, then call it `challenger`.

    Repeated for the same night and weights it finds the version of the first time, or logs another one where the store
    has lost or changed that one's bytes. The champion is not touched.
    Raises ModelFolderError, ServingError, StoredBytesDiffer, TrackingUnavailable.
    """
    for folder in files.by_role().values():
        check_folder(folder)
    digest = file_ref(files.model).sha256
    site.registry.ensure()
    number = _registered_before(site, night, digest, files)
    if number is None:
        with site.worker() as worker:
            number = worker.log_version(
                name=site.model,
                experiment_id=run.experiment_id,
                run_tags=dict(run.tags),
                run_id=run.run_id,
                version_tags={DIGEST: digest, NIGHT: night},
                artifacts={role: str(folder.resolve()) for role, folder in files.by_role().items()},
                settings=settings.stored(),
                max_new_tokens=settings.max_new_tokens,
            ).version
        _verify_upload(site, number, files)
    site.registry.tag(number, lineage.tags())
    if site.registry.alias("champion") != number:
        site.registry.put_alias(CHALLENGER, number)
    return site.registry.version(number)


def fetch_version(site: Site, number: str, destination: Path) -> FetchedVersion:
    """Copy a version's files to `destination`, checked against the hash of its upload. Raises StoredBytesDiffer."""
    version = site.registry.version(number)
    with site.unchanged(version) as stored:
        roles = [role for role in ("model", "adapter") if has_role(stored, role)]
        for role in roles:
            target = destination / role
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(stored_folder(stored, role), target)
    files = ModelFiles(destination / "model", destination / "adapter" if "adapter" in roles else None)
    return FetchedVersion(number, file_ref(files.model).sha256, files)


def fetch_champion(site: Site, destination: Path) -> FetchedVersion | None:
    """The champion as files, or None when there is none yet."""
    number = site.registry.alias("champion")
    return fetch_version(site, number, destination) if number is not None else None


def _registered_before(site: Site, night: str, digest: str, files: ModelFiles) -> str | None:
    """The newest version of this night and these weights that is sound. A spoilt one is passed over: it stays, is never
    promoted, and must not keep the night from ever being registered."""
    for version in reversed(site.registry.versions({DIGEST: digest, NIGHT: night})):
        try:
            _verify_upload(site, version.number, files)
        except StoredBytesDiffer as error:
            log.warning("version %s of %s is passed over: %s", version.number, site.model, error.message)
        else:
            return version.number
    return None


def _verify_upload(site: Site, number: str, files: ModelFiles) -> None:
    """The first time: compare with the files and keep the hash of the whole. Later: the hash of the whole decides."""
    version = site.registry.version(number)
    if TREE in version.tags:
        with site.unchanged(version):
            return
    with site.stored(version) as stored:
        check_upload(stored, files)
        stored_files = hashes(stored)
    site.remember(number, stored_files)
    site.registry.tag(number, {TREE: whole_sha256(stored_files)})
