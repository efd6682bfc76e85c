"""A night at work: its state on disk, its materials, its runs in MLflow. The acts of the flow share one of these."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from configs.schema import NightConfig
from tasks.champion import base_identity, ensure_fetched, freeze_champion, keep_lineage, starting_materials
from tasks.evaluation_prompts import frozen_evaluation
from tasks.launch import StageRun
from tasks.launch_plan import LaunchPlan
from tasks.model_checks import wants_sft
from tasks.model_store import keep_model
from tasks.night_source import source_uri
from tasks.night_state import FrozenChampion, NightBook, NightState, StageNote
from tasks.night_tracking import NightTracker
from tasks.progress import listener
from tasks.ready_child import ReadyChildren
from tasks.result_index import find_result
from tasks.site import Site
from tasks.stages import Materials, NightFacts, builds_own_base, spec_of, stages_of
from training.contract import StageResult, StageSpec, read_result

_UNJUDGED: dict[str, Any] = {"verdict": None, "reason": None, "version": None, "promoted": False, "acts": {}}
"""What a night has to say of its gate and registry before it came there."""


class NightWork:
    """Changes as the night goes on; everything that must outlive the process is in `state`, on disk.

    No dataclass, since Prefect takes those apart on their way into a task.
    """

    def __init__(
        self, config: NightConfig, book: NightBook, site: Site, tracker: NightTracker, state: NightState
    ) -> None:
        self.config = config
        self.book = book
        self.site = site
        self.tracker = tracker
        self.state = state
        self.materials = Materials()
        self.results: dict[str, StageResult] = {}
        self.ready = ReadyChildren()

    @property
    def home(self) -> Path:
        """The home."""
        return self.book.home

    @property
    def folder(self) -> Path:
        """The night's folder."""
        return self.book.folder(self.state.night)

    def note(self, **fields: Any) -> None:
        """Change the state, on disk first."""
        self.state = self.book.change(self.state, **fields)

    def freeze(self) -> None:
        """Fix the champion that this night goes on from and is judged against, once, however often it is run.

        One that was rolled back meanwhile is let go: what it had taught wrong must not come back by a continued night.
        """
        begun_from = self.state.started_from
        if any(self._was_taken_down(frozen) for frozen in (begun_from, self.state.champion)):
            self.note(started_from=None, champion=None, champion_frozen=False, **_UNJUDGED)
        if not self.state.champion_frozen:
            champion = freeze_champion(self.site, self.folder)
            start = self.state.started_from or champion
            self.note(champion=champion, started_from=start, champion_frozen=True)
        self._tell_other_start(begun_from)
        for frozen in (self.state.champion, self.state.started_from):
            ensure_fetched(self.site, frozen)
        self.materials = starting_materials(
            self.config,
            self.home,
            self.state.started_from,
            self.state.champion,
            frozen_evaluation(self.book, self.state, self.config),
        )

    def _was_taken_down(self, frozen: FrozenChampion | None) -> bool:
        return frozen is not None and self.site.journal.is_banned(self.site.model, frozen.version, frozen.digest)

    def _tell_other_start(self, begun_from: FrozenChampion | None) -> None:
        start = self.state.started_from
        if begun_from is not None and start != begun_from:
            listener().note(
                f"version {begun_from.version}, from which night {self.state.night} had begun, was rolled back: the "
                f"night begins again from {'no champion' if start is None else f'version {start.version}'}"
            )

    def thaw(self) -> None:
        """Somebody moved the alias: the next run of this night judges against the new champion."""
        self.note(champion=None, champion_frozen=False)

    def stages(self) -> list[str]:
        """This night's stages, in order."""
        known = self.materials.reference is not None
        stages = stages_of(self.config, known, builds_own_base(self.config), wants_sft(self.config))
        if not known and "sft" not in stages:
            # The base is then itself the reference.
            self.materials = self.materials.with_reference(self.materials.base)
        return stages

    def spec(self, stage: str) -> StageSpec:
        """The spec of a stage, from what is there by now."""
        state = self.state
        source = source_uri(self.config, self.home)
        seeds = {"night": state.seed, "data": state.data_seed}
        facts = NightFacts(state.night, state.index, self.home, state.fingerprint, source, self.config, seeds)
        return spec_of(stage, facts, self.materials)

    def directory(self, stage: str) -> Path:
        """Where a stage works."""
        return self.folder / stage

    def plan(self, stage: str) -> LaunchPlan:
        """How a stage is started."""
        return LaunchPlan.of(self.config.runtime, stage)

    def prepare(self, stage: str, unless_done: StageSpec) -> None:
        """Start the process of the stage that comes next while this one computes; not while a result is only reused."""
        this = unless_done
        if find_result(Path(this.home), self.directory(this.stage), this.key) is None:
            self.ready.prepare(stage, self.directory(stage), self.plan(stage))

    def took(self, stage: str, done: StageRun) -> None:
        """A stage is done: its outputs become materials, its figures go to MLflow."""
        self.results[stage] = done.result
        self.materials = self.materials.after(stage, done.result)
        if stage == "sft" and self.materials.reference is not None:
            # Adapters remember where their base lies, so the reference gets its lasting place at once.
            self.materials = self.materials.with_reference(keep_model(self.home, self.materials.reference))
        note = StageNote(
            how="reused" if done.reused else "done",
            seconds=done.seconds,
            attempts=done.attempts,
            ended=time.time(),
            directory=str(done.directory),
            key=done.result.key,
        )
        self.state = self.book.note_stage(self.state, stage, _longest(note, self.state.stages.get(stage)))
        self.tracker.stage_done(stage, done)

    def lost(self, stage: str, seconds: float) -> None:
        """A stage has failed."""
        note = StageNote(how="failed", seconds=seconds, ended=time.time(), directory=str(self.directory(stage)))
        self.state = self.book.note_stage(self.state, stage, note)

    def reload(self) -> None:
        """Take the results of every stage that is noted as done from disk: for a night that is over."""
        for stage, note in self.state.stages.items():
            if note.how != "failed":
                self.results[stage] = read_result(Path(note.directory))
                self.materials = self.materials.after(stage, self.results[stage])

    @contextmanager
    def warm_serving(self) -> Iterator[None]:
        """One serving child for registration and promotion together."""
        cold = self.site
        try:
            with cold.warm() as self.site:
                yield
        finally:
            self.site = cold

    def keep(self) -> None:
        """Keep what later nights need of this one."""
        keep_lineage(self.home, self.materials)

    def finish(self, status: str) -> None:
        """End the runs in MLflow, and note what MLflow could not be told."""
        self.tracker.finish(status, self.state.ended)
        self.note(owed=tuple(dict.fromkeys(self.tracker.late)))

    def base_identity(self) -> str:
        """What stands for the base in the lineage."""
        return base_identity(self.config, self.materials.base)


def _longest(note: StageNote, earlier: StageNote | None) -> StageNote:
    """A continued night reuses what it did before: the table shows the seconds that it really took."""
    if note.how == "reused" and earlier is not None and earlier.key == note.key and earlier.how == "done":
        return earlier
    return note
