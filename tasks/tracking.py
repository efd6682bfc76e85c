"""A night in MLflow: one parent run, one nested run a stage, resumed under the same identifiers when the night is."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.credentials import without_credentials
from tasks.candidate import RegisterRun
from tasks.delivery import Destination
from tasks.mlflow_keys import mlflow_key
from tasks.night_page import fit_note, with_gaps
from tasks.night_params import compared_params
from tasks.registry import answering
from tasks.run_lookup import WHOLE_NIGHT, experiment_of, find_or_create_run, night_tags, run_exists
from tasks.run_tags import CONFIG_HASH, NOTE, PARENT
from tasks.site import Site
from training.contract import write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from configs.schema.night import NightConfig

STATE = "tracking.json"
_FIRST_PICTURES = ("reward_and_kl", "gold_against_proxy")
_DIGEST_CHARACTERS = 32
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DatasetRef:
    """A snapshot as MLflow should show it: `sha256` in full (MLflow itself keeps at most 36 characters of a digest)."""

    name: str
    uri: str
    sha256: str
    num_rows: int
    context: str = "training"


@dataclass
class _State:
    """What tracking.json in the night's folder holds."""

    experiment_id: str
    run_id: str
    stages: dict[str, str] = field(default_factory=dict)
    ending: str | None = None
    ending_at: float | None = None
    ended: bool = False


class NightRun:
    """The night's runs. Every method may raise TrackingUnavailable; nothing is lost then, it can be called again."""

    def __init__(self, site: Site, night: str, state: _State) -> None:
        self.site = site
        self.night = night
        self._state = state

    @classmethod
    def open(cls, site: Site, night: str, config: NightConfig) -> NightRun:
        """Start the parent run with few params and the whole config as artifact, or resume the one of this night."""
        state = _read_state(site.home, night)
        if state is None or not run_exists(site, state.run_id):
            experiment = experiment_of(site)
            state = _State(experiment, find_or_create_run(site, experiment, night, WHOLE_NIGHT, {}))
        state.ending, state.ending_at, state.ended = None, None, False
        opened = cls(site, night, state)
        opened._save()
        opened._resume(state.run_id)
        opened._describe(config)
        return opened

    @classmethod
    def unended(cls, site: Site, night: str) -> NightRun | None:
        """The runs of a night that was over while MLflow was away; None where nothing is owed."""
        state = _read_state(site.home, night)
        return cls(site, night, state) if state is not None and state.ending and not state.ended else None

    @property
    def run_id(self) -> str:
        """The parent run."""
        return self._state.run_id

    def url(self) -> str | None:
        """Where a browser finds the run, when MLflow is a server."""
        run = f"#/experiments/{self._state.experiment_id}/runs/{self.run_id}"
        base = without_credentials(self.site.tracking_uri.rstrip("/"))
        return f"{base}/{run}" if base.startswith("http") else None

    def stage_run(self, stage: str) -> str:
        """The nested run of a stage, created on first use and found again later."""
        if stage not in self._state.stages:
            experiment, parent = self._state.experiment_id, {PARENT: self.run_id}
            self._state.stages[stage] = find_or_create_run(self.site, experiment, self.night, stage, parent)
            self._save()
        return self._state.stages[stage]

    def start_stage(self, stage: str) -> None:
        """Show a stage as running."""
        self._resume(self.stage_run(stage))

    def destination(self, stage: str) -> Destination:
        """Where tasks.delivery sends the stage's metrics."""
        client, uri = self.site.registry.client, self.site.tracking_uri
        return Destination(client, uri, self.stage_run(stage), self.site.config.max_points)

    def finish_stage(
        self,
        stage: str,
        status: str = "FINISHED",
        metrics: Mapping[str, float | None] | None = None,
        ended: float | None = None,
    ) -> None:
        """End a stage's run (FINISHED, FAILED or KILLED) with its final metrics, shown as final/<name>.

        `ended`: when the stage was over, in seconds since 1970; null: now.
        """
        run_id = self.stage_run(stage)
        self.log_final(run_id, metrics or {})
        with answering(self.site.tracking_uri):
            self._end(run_id, status, ended)

    def finish_act(
        self,
        act: str,
        status: str,
        metrics: Mapping[str, float],
        tags: Mapping[str, str],
        ended: float | None = None,
    ) -> None:
        """End the run of an act of the night's own process (gate, register, promote) with its numbers and tags."""
        run_id, client = self.stage_run(act), self.site.registry.client
        self.log_final(run_id, metrics, prefix="")
        with answering(self.site.tracking_uri):
            for name, value in tags.items():
                client.set_tag(run_id, mlflow_key(name), value)
            self._end(run_id, status, ended)

    def log_final(self, run_id: str, metrics: Mapping[str, float | None], prefix: str = "final/") -> None:
        """Final numbers of a run. A value that is not finite (null in a result) is a tag, not a number."""
        with answering(self.site.tracking_uri):
            for name, value in metrics.items():
                key = mlflow_key(f"{prefix}{name}")
                if value is None or not math.isfinite(value):
                    self.site.registry.client.set_tag(run_id, f"nonfinite.{key.replace('/', '.', 1)}", "not finite")
                else:
                    self.site.registry.client.log_metric(run_id, key, value)

    def log_metrics(self, metrics: Mapping[str, float | None]) -> None:
        """Final numbers of the night, on the parent run: what the compare page shows."""
        self.log_final(self.run_id, metrics)

    def tag(self, tags: Mapping[str, str]) -> None:
        """Tags on the parent run."""
        with answering(self.site.tracking_uri):
            for name, value in tags.items():
                self.site.registry.client.set_tag(self.run_id, name, value)

    def log_datasets(self, datasets: Sequence[DatasetRef]) -> None:
        """Snapshots as inputs of the night, their full sha256 as tags."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs = [
            DatasetInput(
                Dataset(
                    name=ref.name,
                    digest=ref.sha256[:_DIGEST_CHARACTERS],
                    source_type="local",
                    source=json.dumps({"uri": ref.uri}),
                    profile=json.dumps({"num_rows": ref.num_rows}),
                ),
                tags=[InputTag("mlflow.data.context", ref.context)],
            )
            for ref in datasets
        ]
        with answering(self.site.tracking_uri):
            self.site.registry.client.log_inputs(self.run_id, datasets=inputs)
        self.tag({f"nightjar.sha256.{ref.name}": ref.sha256 for ref in datasets})

    def log_artifact(self, path: Path, folder: str, stage: str | None = None) -> None:
        """A file, or everything in a folder, under `folder` of the parent run or of a stage's run."""
        run_id = self.run_id if stage is None else self.stage_run(stage)
        client = self.site.registry.client
        with answering(self.site.tracking_uri):
            if path.is_dir():
                client.log_artifacts(run_id, str(path), folder)
            else:
                client.log_artifact(run_id, str(path), folder)

    def log_figures(self, figures: Mapping[str, Figure]) -> None:
        """Pictures by file name, under figures/ of the parent run."""
        with answering(self.site.tracking_uri):
            for name, figure in figures.items():
                self.site.registry.client.log_figure(self.run_id, figure, f"figures/{name}")

    def pictures(self) -> dict[str, str]:
        """Pictures that the run has, what decides first: what each shows -> its address, relative to MLflow's pages."""
        with answering(self.site.tracking_uri):
            found = self.site.registry.client.list_artifacts(self.run_id, "figures")
        names = [Path(item.path).stem for item in found if item.path.endswith(".png")]
        names = [*(name for name in _FIRST_PICTURES if name in names), *sorted(set(names) - set(_FIRST_PICTURES))]
        place = f"get-artifact?path=figures%2F{{}}.png&run_uuid={self.run_id}"
        return {name.replace("_", " "): place.format(name) for name in names}

    def log_answers(self, columns: Mapping[str, Sequence[Any]], file: str = "answers.json") -> None:
        """A table for MLflow's evaluation view, once: MLflow would append a second time."""
        client = self.site.registry.client
        with answering(self.site.tracking_uri):
            if not any(item.path == file for item in client.list_artifacts(self.run_id)):
                client.log_table(self.run_id, data=dict(columns), artifact_file=file)

    def note(self, markdown: str, whole: str, plain: str | None = None) -> None:
        """The note on top of the run's page; in full (or as `plain`, without pictures) as the artifact `whole`."""
        with answering(self.site.tracking_uri):
            self.site.registry.client.log_text(self.run_id, markdown if plain is None else plain, whole)
            self.site.registry.client.set_tag(self.run_id, NOTE, fit_note(with_gaps(markdown), whole))

    def register_run(self) -> RegisterRun:
        """The short run that logs the model version: the nested run `register`, where it has been shown already."""
        tags = night_tags(self.site, self.night, "register") | {PARENT: self.run_id}
        return RegisterRun(self._state.experiment_id, tags, self._state.stages.get("register"))

    def finish(self, status: str = "FINISHED", ended: float | None = None) -> None:
        """End the night's run and whatever nested run is still open. The wish is kept, should MLflow be away.

        `ended`: when the night was over, in seconds since 1970; null: now.
        """
        self._state.ending, self._state.ending_at = status, ended or time.time()
        self._save()
        end_time = round(self._state.ending_at * 1000)
        client, uri = self.site.registry.client, self.site.tracking_uri
        condition = f"tags.`{PARENT}` = '{self.run_id}' and attributes.status = 'RUNNING'"
        with answering(uri):
            for run in client.search_runs([self._state.experiment_id], condition):
                self._end(run.info.run_id, "KILLED" if status == "FINISHED" else status, self._state.ending_at)
            client.set_terminated(self.run_id, status=status, end_time=end_time)
        self._state.ended = True
        self._save()

    def finish_late(self) -> bool:
        """`finish` as it was wished for; False, once, where this store does not know the run."""
        there = run_exists(self.site, self.run_id)
        if there:
            self.finish(self._state.ending or "KILLED", self._state.ending_at)
        self._state.ended = True
        self._save()
        return there

    def _describe(self, config: NightConfig) -> None:
        from mlflow.entities import Param

        client = self.site.registry.client
        with answering(self.site.tracking_uri):
            there = client.get_run(self.run_id).data.params
            params = compared_params(config.model_dump(mode="json"))
            # Params are immutable: a resumed night logs what is missing, never another value.
            missing = [Param(key, value) for key, value in params.items() if key not in there]
            client.log_batch(self.run_id, params=missing)
            client.set_tag(self.run_id, CONFIG_HASH, config.config_hash)
            client.log_dict(self.run_id, config.model_dump(mode="json"), "config/night.yaml")

    def _end(self, run_id: str, status: str, ended: float | None) -> None:
        """End a run when its work ended, never before it began. One that has ended like this already keeps its end."""
        info = self.site.registry.client.get_run(run_id).info
        if info.status != status or info.end_time is None:
            end_time = max(round((ended or time.time()) * 1000), info.start_time)
            self.site.registry.client.set_terminated(run_id, status=status, end_time=end_time)

    def _resume(self, run_id: str) -> None:
        with answering(self.site.tracking_uri):
            if self.site.registry.client.get_run(run_id).info.status != "RUNNING":
                self.site.registry.client.update_run(run_id, status="RUNNING")

    def _save(self) -> None:
        folder = _folder(self.site.home, self.night)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / STATE, asdict(self._state))


def _read_state(home: Path, night: str) -> _State | None:
    try:
        return _State(**json.loads((_folder(home, night) / STATE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        log.warning("%s of night %s cannot be read; its runs are looked up by their tags", STATE, night)
        return None


def _folder(home: Path, night: str) -> Path:
    return home / "runs" / night
