"""Measuring the champion again, after its promotion: the evaluate stage with the champion as its own challenger."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from configs.errors import NightjarError
from configs.schema import NightConfig
from tasks.champion import freeze_champion, no_champion
from tasks.launch_plan import LaunchPlan
from tasks.locks import held_lock, slug, watch_lock_path
from tasks.model_store import find_model
from tasks.night_state import FrozenChampion, NightBook, NightState
from tasks.registry_errors import LockHeld
from tasks.site import Site
from tasks.stages import code_version, function_facts
from training.contract import FileRef, StageResult, StageSpec, file_ref, read_result
from training.errors import ContractError
from training.evaluation.report import read_report

FOLDER = "watch"
ANOTHER_MEASURES = "another measurement is running"
_NAME = "measurement-"


class MeasurementAtWork(LockHeld):
    """The champion is being measured already: a second one of the same minutes says nothing about its patience."""


@dataclass(frozen=True)
class Measurement:
    """What is to be run: the champion, the stage's spec, its directory and how it is started."""

    champion: FrozenChampion
    spec: StageSpec
    directory: Path
    plan: LaunchPlan


@contextmanager
def only_measurement(home: Path, model: str) -> Iterator[None]:
    """Be the only measurement of this model in this home. Raises MeasurementAtWork at once."""
    with ExitStack() as alone:
        try:
            alone.enter_context(held_lock(watch_lock_path(home, model), f"a measurement of {model}"))
        except LockHeld as busy:
            raise MeasurementAtWork(busy.message, busy.hint) from None
        yield


def claim_directory(home: Path) -> tuple[int, Path]:
    """The next measurement's number and directory, which nobody else gets: models of one home are measured at once."""
    folder = home / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    taken = (found.name.removeprefix(_NAME) for found in folder.glob(f"{_NAME}*"))
    number = 1 + max((int(name) for name in taken if name.isdecimal()), default=0)
    while True:
        directory = folder / f"{_NAME}{number:05d}"
        try:
            directory.mkdir()
        except FileExistsError:
            number += 1
        else:
            return number, directory


def prepare_measurement(site: Site, config: NightConfig, book: NightBook) -> Measurement:
    """The next measurement of the present champion, on the newest snapshot, with fresh sampling.

    Raises NightjarError when there is no champion, or what it was judged with is gone.
    """
    champion = freeze_champion(site, book.home / FOLDER / slug(site.model))
    if champion is None:
        raise no_champion(site)
    inputs = _inputs(champion, config, book)
    number, directory = claim_directory(book.home)
    dumped = config.model_dump(mode="json")
    dumped["evaluation"] |= {"prompts": min(config.watch.prompts, config.evaluation.prompts)}
    spec = StageSpec(
        stage="evaluate",
        night=f"watch-{number:05d}",
        home=str(book.home),
        seed=(config.seed + number) % 2**31,  # other draws each time, so that chance does not repeat itself
        config={name: dumped[name] for name in ("models", "reward", "evaluation")},
        inputs=inputs,
        params={"confidence_levels": [config.evaluation.confidence], **function_facts(config)},
        code_version=code_version(),
    )
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
