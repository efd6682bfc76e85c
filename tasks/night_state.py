"""What a night remembers of itself in `<home>/runs/<night>/night.json`, written whole after every change."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from configs.schema import NightConfig
from configs.schema.base import Section
from tasks.lenient import without_unknown_keys
from training.contract import read_json, write_json
from training.errors import ContractError

RUNS = "runs"
NIGHT = "night.json"
CONFIG = "config.json"
_DAMAGED = "restore it from a backup; the other nights go on without it, and its number is not given again"
Moment = Annotated[float, Field(ge=0.0, le=253_402_214_400.0, allow_inf_nan=False)]
"""Seconds since 1970, before the year 9999: what a clock can have said and a calendar can show."""
Seconds = Annotated[float, Field(allow_inf_nan=False)]
Status = Literal["running", "finished", "failed", "skipped"]


class FrozenChampion(Section):
    """The champion as it was when the night began; the whole night is judged against this one.

    `model` and `adapter` are folders; the digests name what its lineage needs: the reference that anchors its KL, the
    base below that, and the reward model it was trained with (each null where it is not recorded).
    """

    version: str
    digest: str
    model: str
    adapter: str | None = None
    reference_sha256: str | None = None
    base_sha256: str | None = None
    reward_model_sha256: str | None = None


class StageNote(Section):
    """How a stage came about in this night: `how` is done or reused, or failed; seconds of wall clock.

    `ended`: when, in seconds since 1970; null in nights of before.
    """

    how: Literal["done", "reused", "failed"]
    seconds: Seconds
    attempts: int = 0
    ended: Moment | None = None
    directory: str = ""
    key: str = ""


class NightState(Section):
    """One night. `index` counts the nights of one chain (`name`) from 1; `fingerprint` is the digest of the source.

    `seed`: of the stages that sample from the policy; `data_seed`: of those that train on the data alone. Fixed when
    the night begins; null in nights of before, which draw from the config's seed.

    `started_from`: the champion whose policy, reference and student this night goes on from; `champion`: the one it is
    judged against, the same one unless somebody moved the alias meanwhile. Both are null on a cold start, which
    `champion_frozen` tells from not having looked yet. `acts`: gate, register and promote, which run in the night's own
    process. `owed`: what could not be shown in MLflow and is sent later.
    """

    night: str
    index: int
    name: str
    config_hash: str
    fingerprint: str
    seed: int | None = None
    data_seed: int | None = None
    status: Status = "running"
    started: Moment
    ended: Moment | None = None
    champion_frozen: bool = False
    started_from: FrozenChampion | None = None
    champion: FrozenChampion | None = None
    snapshot_sha256: str | None = None
    stages: dict[str, StageNote] = Field(default_factory=dict)
    acts: dict[str, StageNote] = Field(default_factory=dict)
    verdict: str | None = None
    reason: str | None = None
    version: str | None = None
    promoted: bool = False
    flow_run_id: str | None = None
    mlflow_run_id: str | None = None
    owed: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Wall clock from the first start to the end, or until now."""
        return (self.ended or time.time()) - self.started

    @property
    def sentence(self) -> str:
        """The night in one line."""
        shown = self.verdict or self.status
        return f"{self.night}: {shown}" + (f", {self.reason}" if self.reason else "")


class NightBook:
    """All nights of a home."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def folder(self, night: str) -> Path:
        """Where the night's stages lie."""
        return self.home / RUNS / night

    def save(self, state: NightState) -> NightState:
        """Write night.json and hand the state back."""
        folder = self.folder(state.night)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / NIGHT, state.model_dump(mode="json"))
        return state

    def save_config(self, night: str, config: NightConfig) -> None:
        """Keep the effective config beside the night."""
        write_json(self.folder(night) / CONFIG, config.model_dump(mode="json"))

    def config(self, night: str) -> NightConfig:
        """The effective config of a night. Raises ContractError."""
        file = self.folder(night) / CONFIG
        try:
            return without_unknown_keys(NightConfig, read_json(file))
        except ValidationError as error:
            raise ContractError(f"{file}: was written by another version: {error.error_count()} problem(s)") from None

    def change(self, state: NightState, **fields: Any) -> NightState:
        """The state with `fields` changed, saved."""
        return self.save(NightState.model_validate(state.model_dump() | fields))

    def note_stage(self, state: NightState, stage: str, note: StageNote) -> NightState:
        """The state with one more stage noted, saved."""
        return self.change(state, stages={**state.stages, stage: note})

    def load(self, night: str) -> NightState:
        """One night. Raises ContractError naming the file and what is wrong in it."""
        file = self.folder(night) / NIGHT
        try:
            state = without_unknown_keys(NightState, read_json(file))
        except ValidationError as error:
            first = error.errors()[0]
            what = f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {first['msg']}"
            problems = f"{error.error_count()} problem(s), the first: {what}"
            raise ContractError(f"{file}: not a night's state: {problems}", _DAMAGED) from None
        except ContractError as error:
            raise ContractError(error.message, _DAMAGED) from None
        if state.night != night:
            raise ContractError(f"{file}: is the record of another night, {state.night}", _DAMAGED)
        return state

    def nights(self, name: str | None = None) -> list[NightState]:
        """All nights, or those of one chain, oldest first. What cannot be read is left out: see `unreadable`."""
        found = [night for night in map(self._look, self.names()) if isinstance(night, NightState)]
        return _oldest_first([night for night in found if name in (None, night.name)])

    def unreadable(self) -> list[ContractError]:
        """Nights whose record cannot be read. They hinder no other night, but a person should look at them."""
        return [night for night in map(self._look, self.names()) if isinstance(night, ContractError)]

    def next_index(self, name: str) -> int:
        """Number of the chain's next night: one that no folder has, be its record readable or not."""
        numbers = [night.removeprefix(f"{name}-") for night in self.names() if night.startswith(f"{name}-")]
        return 1 + max((int(number) for number in numbers if number.isdecimal()), default=0)

    def names(self) -> list[str]:
        """Every night that has left a record, a config or a decision, be it readable or not."""
        left = (NIGHT, CONFIG, "gate/decision.json")
        return sorted({file.relative_to(self.home / RUNS).parts[0] for one in left for file in self._left(one)})

    def _left(self, name: str) -> Iterator[Path]:
        return (self.home / RUNS).glob(f"*/{name}")

    def _look(self, night: str) -> NightState | ContractError:
        try:
            return self.load(night)
        except ContractError as error:
            return error


def _oldest_first(nights: Iterable[NightState]) -> list[NightState]:
    """A chain's nights by their numbers, which a clock set back does not touch; those of several chains by the clock,
    where none began later than the next one of its chain."""
    latest: dict[str, float] = {}
    dated = []
    for night in sorted(nights, key=lambda night: night.index, reverse=True):
        latest[night.name] = min(night.started, latest.get(night.name, night.started))
        dated.append((latest[night.name], night.index, night))
    return [night for *_, night in sorted(dated, key=lambda item: item[:2])]
