"""A real MLflow registry, but versions are registered and promoted without starting serving children."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from tasks import champion, champion_change, launch_plan, stages
from tasks.candidate import FetchedVersion
from tasks.journal import Entry, new_act
from tasks.model_manifest import ModelFiles
from tasks.promotion import Promotion
from tasks.registry import CHALLENGER, CHAMPION
from training.contract import file_ref


def register(site, files, night, lineage, run, settings):
    site.registry.ensure()
    found = site.registry.versions({"nightjar.night": night})
    if found:
        return found[-1]
    tags = dict(lineage.tags()) | {"nightjar.night": night}
    version = site.registry.client.create_model_version(site.model, str(files.model), tags=tags).version
    site.registry.put_alias(CHALLENGER, str(version))
    return site.registry.version(str(version))


def promote(site, candidate, *, judged_against, night=None, force=None):
    assert site.registry.alias(CHAMPION) == judged_against
    entry = Entry("pending", site.model, new_act(), previous=judged_against, candidate=candidate, night=night)
    site.journal.write(entry)
    site.registry.put_alias(CHAMPION, candidate)
    site.journal.write(replace(entry, event="verified"))
    return Promotion(candidate, judged_against, True, 0.0)


def fetch(site, number, destination: Path):
    source = Path(site.registry.version(number).source)
    shutil.copytree(source, destination / "model", dirs_exist_ok=True)
    shutil.copytree(source.parent / "adapter", destination / "adapter", dirs_exist_ok=True)
    files = ModelFiles(destination / "model", destination / "adapter")
    return FetchedVersion(number, file_ref(files.model).sha256, files)


def small_stages(patch) -> None:
    """Every stage is the one of nightjar_fakes; code versions stand still while the code is being written."""
    for stage in stages.SHAPES:
        patch.setitem(launch_plan.MODULES, stage, "nightjar_fakes")
    patch.setattr(stages, "code_version", lambda package="training": "fake")


def light_registry(patch) -> None:
    """Register, promote and fetch in milliseconds."""
    patch.setattr(champion_change, "register_candidate", register)
    patch.setattr(champion_change, "promote", promote)
    patch.setattr(champion, "fetch_version", fetch)
