"""What every start does first: close what dead processes left open, in the registry and among the runs."""

from __future__ import annotations

import logging
import shutil
import time
from dataclasses import dataclass, field

from tasks.agreement import compare, way_out
from tasks.registry import PREVIOUS, answering
from tasks.registry_errors import LockHeld
from tasks.rolled_back import mend_marks
from tasks.run_lease import leases_folder, read_lease
from tasks.run_tags import HOME, NIGHT_NAME, home_id
from tasks.settle import settle_unfinished
from tasks.site import Site

log = logging.getLogger(__name__)
_PAGE = 500
_SCRATCH_SECONDS = 24 * 3600.0


@dataclass
class Reconciled:
    """What was found and done. `problems` are left for a person."""

    settled: list[str] = field(default_factory=list)
    """One sentence an act of the journal that was reverted or completed, and a torn line that was sealed."""
    closed_runs: list[str] = field(default_factory=list)
    """MLflow runs of dead processes, now KILLED."""
    problems: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    """What other hands did to the champion; it stands."""
    busy: list[str] = field(default_factory=list)
    """Promotions and rollbacks that are at work right now: nobody's fault, and looked at again at the next start."""
    contradicted: bool = False
    """Journal and registry contradict each other: no champion was changed, and a person has to look."""

    @property
    def nothing_to_do(self) -> bool:
        """Whether the last night left everything in order."""
        return not (self.settled or self.closed_runs or self.problems or self.busy)


def reconcile(site: Site) -> Reconciled:
    """Revert a promotion that never reached `verified`, complete a rollback that was begun, close dead runs as KILLED.

    Doing it twice changes nothing. A promotion that is at work right now is left alone and named. Where
    journal and registry contradict each other, acts are left as they are: an open one may only have lost its end.
    Raises TrackingUnavailable, JournalError.
    """
    done = Reconciled()
    try:
        with site.locked("reconcile"):
            _settle(site, done)
    except LockHeld as error:
        done.busy.append(f"{error.message}; what it leaves open is looked at afterwards")
    _remove_scratch(site)
    done.closed_runs = close_dead_runs(site)
    return done


def _settle(site: Site, done: Reconciled) -> None:
    found = compare(site)
    if found.lost:
        done.contradicted = True
        done.problems += [*found.lost, f"what to do: {way_out(site)}"]
        return
    done.settled = [settled.sentence for settled in settle_unfinished(site)]
    if site.journal.log.seal():
        what = "the torn last line of a killed writer was sealed; it counts as not written"
        done.settled.append(f"{site.journal.log.path}: {what}")
    _mend_previous(site)
    mend_marks(site)
    # A promotion that was just reverted was nobody's hand.
    done.moved = list(compare(site).moved if done.settled else found.moved)


def close_dead_runs(site: Site) -> list[str]:
    """End the RUNNING runs of this home whose night has no living process. Other people's runs are never touched."""
    client = site.registry.client
    with answering(site.tracking_uri):
        experiment = client.get_experiment_by_name(site.config.experiment)
        if experiment is None:
            return []
        condition = f"tags.`{HOME}` = '{home_id(site.home)}' and attributes.status = 'RUNNING'"
        runs = client.search_runs([experiment.experiment_id], condition, max_results=_PAGE)
        dead = [run for run in runs if not _answered_for(site, run.data.tags.get(NIGHT_NAME, ""))]
        for run in dead:
            client.set_terminated(run.info.run_id, status="KILLED")
    _remove_dead_leases(site)
    return [run.info.run_id for run in dead]


def _answered_for(site: Site, night: str) -> bool:
    lease = read_lease(site.home, night)
    return lease is not None and lease.alive()


def _mend_previous(site: Site) -> None:
    """The alias `previous` follows the journal; a process that died after `verified` may have left it behind."""
    champions = site.journal.champions(site.model)
    if champions and site.registry.alias("champion") == champions[-1]:
        site.registry.put_alias(PREVIOUS, site.journal.previous_champion(site.model))


def _remove_dead_leases(site: Site) -> None:
    for file in leases_folder(site.home).glob("*.json"):
        lease = read_lease(site.home, file.stem)
        if lease is not None and not lease.alive():
            file.unlink(missing_ok=True)


def _remove_scratch(site: Site) -> None:
    """Downloads of serving children whose parent was killed; young folders may belong to a living one."""
    for folder in (site.home / "scratch").glob("*-*"):
        if time.time() - folder.stat().st_mtime > _SCRATCH_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)
