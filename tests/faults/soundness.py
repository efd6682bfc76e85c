"""What must hold after every fault, asked of the registry, the journal, the disk and the process table themselves."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import psutil

from tasks.last_config import site_of
from tasks.night_lock import only_night
from tasks.process_tree import MARK
from tasks.registry import CHAMPION
from tasks.registry_errors import StoredBytesDiffer
from tasks.run_tags import HOME, home_id
from tasks.site import Site
from tasks.version_tags import TREE, VERDICT
from training.checkpoint import CheckpointFolder
from training.errors import CheckpointError

QUESTION = "what is 2 + 3?"


def assert_sound(
    home: Path, *, spoilt: Collection[str] = (), torn_lines: int = 0, by_hand: bool = False, chain: str = "fault"
) -> None:
    """The home after a fault and the start that follows it.

    The champion alias loads and generates, and is the one that the journal knows (unless it was moved `by_hand`); no
    act is open; every version is there with the bytes of its upload (those in `spoilt` were damaged on purpose); no
    MLflow run is RUNNING; no checkpoint is torn; no process of a stage is left; the locks are free.
    """
    site = site_of(home)
    assert_champion_answers(home)
    champion = site.registry.alias(CHAMPION)
    if not by_hand:
        assert site.journal.champions(site.model)[-1:] == ((champion,) if champion else ())
    assert site.journal.unfinished() == []
    assert site.journal.torn_lines() == torn_lines
    assert lost_versions(site) == sorted(spoilt)
    assert running_runs(site) == []
    assert torn_checkpoints(home) == []
    assert processes_below(home) == []
    with only_night(home, chain), site.locked("a look"):
        pass


def assert_champion_answers(home: Path) -> None:
    """The alias names nobody, or a version that loads through it, and is the one that generates. At any moment."""
    site = site_of(home)
    champion = site.registry.alias(CHAMPION)
    if champion is None:
        return
    with site.worker() as worker:
        answers = worker.answer(f"models:/{site.model}@{CHAMPION}", [QUESTION], 4)
    assert answers.model_id == site.registry.version(champion).model_id


def assert_next_night_works(nights, *, spoilt: Collection[str] = (), torn_lines: int = 0) -> str:
    """One more night with new data promotes; the number of its version."""
    state = nights.run()
    assert state.is_completed(), state.message
    assert "is champion" in state.message, state.message
    assert_sound(nights.home, spoilt=spoilt, torn_lines=torn_lines)
    champion = site_of(nights.home).registry.alias(CHAMPION)
    assert champion is not None
    return champion


def lost_versions(site: Site) -> list[str]:
    """Versions whose stored bytes are not those of their upload, or that the journal names and nobody has.

    One that was never verified, since its process was killed while it was uploaded, is no version yet.
    """
    there = {version.number: version for version in site.registry.versions()}
    named = {v for e in site.journal.entries(site.model) for v in (e.previous, e.candidate, e.restored) if v}
    lost = named - set(there)
    for number, version in there.items():
        if TREE not in version.tags:
            continue
        try:
            with site.unchanged(version):
                pass
        except StoredBytesDiffer:
            lost.add(number)
    return sorted(lost)


def sound_versions(site: Site) -> list[str]:
    """Versions that somebody might promote by hand: the gate passed them, nobody took them down, their bytes hold."""
    lost = set(lost_versions(site)) | set(site.journal.banned_versions(site.model))
    passed = [version.number for version in site.registry.versions() if version.tags.get(VERDICT) == "PASS"]
    return [number for number in passed if number not in lost]


def running_runs(site: Site) -> list[str]:
    """Runs of this home that MLflow shows as RUNNING."""
    client = site.registry.client
    experiment = client.get_experiment_by_name(site.config.experiment)
    if experiment is None:
        return []
    condition = f"tags.`{HOME}` = '{home_id(site.home)}' and attributes.status = 'RUNNING'"
    return [str(run.info.run_name) for run in client.search_runs([experiment.experiment_id], condition)]


def torn_checkpoints(home: Path) -> list[str]:
    """Checkpoints that bear their final name and are not whole."""
    torn = []
    for folder in {step.parent for step in home.glob("runs/*/*/checkpoints/step_*")}:
        checkpoints = CheckpointFolder(folder)
        for step in checkpoints.steps():
            try:
                checkpoints.at(step)
            except CheckpointError as error:
                torn.append(str(error))
    return torn


def processes_below(home: Path) -> list[str]:
    """Command lines of living processes that were started for a stage of this home; a stack in it is none."""
    place, stack = f"{home.resolve()}/", f"{home.resolve()}/stack/"
    found = []
    for process in psutil.process_iter():
        try:
            is_alive = process.status() != psutil.STATUS_ZOMBIE
            mark = f"{process.environ().get(MARK, '')}/"
            if is_alive and mark.startswith(place) and not mark.startswith(stack):
                found.append(" ".join(process.cmdline()))
        except (psutil.Error, OSError):
            continue
    return found
