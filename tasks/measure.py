"""Measuring the champion again, after its promotion: the evaluate stage with the champion as its own challenger."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from configs.errors import NightjarError
from configs.schema import NightConfig
from tasks.champion import freeze_champion
from tasks.launch_plan import LaunchPlan
from tasks.model_store import find_model
from tasks.night_state import FrozenChampion, NightBook, NightState
from tasks.site import Site
from tasks.stages import code_version, function_facts
from training.contract import FileRef, StageResult, StageSpec, file_ref, read_result
from training.errors import ContractError
from training.evaluation.report import read_report

FOLDER = "watch"


@dataclass(frozen=True)
class Measurement:
    """What is to be run: the champion, the stage's spec, its directory and how it is started."""

    champion: FrozenChampion
    spec: StageSpec
    directory: Path
    plan: LaunchPlan


def prepare_measurement(site: Site, config: NightConfig, book: NightBook) -> Measurement:
    """The next measurement of the present champion, on the newest snapshot, with fresh sampling.

    Raises NightjarError when there is no champion, or what it was judged with is gone.
    """
    champion = freeze_champion(site, book.home / FOLDER)
    if champion is None:
        raise NightjarError(f"{site.model} has no champion yet", "run a night first: nightjar run CONFIG")
    number = 1 + sum(1 for _ in (book.home / FOLDER).glob("measurement-*"))
    dumped = config.model_dump(mode="json")
    dumped["evaluation"] |= {"prompts": min(config.watch.prompts, config.evaluation.prompts)}
    spec = StageSpec(
        stage="evaluate",
        night=f"watch-{number:05d}",
        home=str(book.home),
        seed=(config.seed + number) % 2**31,  # other draws each time, so that chance does not repeat itself
        config={name: dumped[name] for name in ("models", "reward", "evaluation")},
        inputs=_inputs(champion, config, book),
        params={"confidence_levels": [config.evaluation.confidence], **function_facts(config)},
        code_version=code_version(),
    )
    directory = book.home / FOLDER / f"measurement-{number:05d}"
    return Measurement(champion, spec, directory, LaunchPlan.of(config.runtime, "evaluate"))


def measured(result: StageResult) -> dict[str, float]:
    """Metric name to the champion's value."""
    report = read_report(Path(result.output("report").path))
    return {metric.name: metric.overall.challenger.value for metric in report.metrics}


def _inputs(champion: FrozenChampion, config: NightConfig, book: NightBook) -> dict[str, FileRef]:
    inputs = {"snapshot": _newest_snapshot(book, config), "challenger": file_ref(Path(champion.model))}
    reference = find_model(book.home, champion.reference_sha256)
    if reference is None:
        raise _gone("reference", champion)
    inputs["reference"] = reference
    if config.reward.kind == "model":
        student = find_model(book.home, champion.reward_model_sha256)
        if student is None:
            raise _gone("reward model", champion)
        inputs["student"] = student
    return inputs


def _newest_snapshot(book: NightBook, config: NightConfig) -> FileRef:
    for state in reversed(book.nights(config.name)):
        folder = _snapshot_folder(state)
        if folder is not None:
            return file_ref(folder)
    raise NightjarError(f"home {book.home} holds no snapshot", "run a night first: nightjar run CONFIG")


def _snapshot_folder(state: NightState) -> Path | None:
    note = state.stages.get("validate")
    try:
        return Path(read_result(Path(note.directory)).output("snapshot").path) if note is not None else None
    except ContractError:
        return None


def _gone(what: str, champion: FrozenChampion) -> NightjarError:
    return NightjarError(
        f"the {what} of version {champion.version} is not in the home's models folder",
        "watch from the home that ran the nights, or restore its models folder from a backup",
    )
