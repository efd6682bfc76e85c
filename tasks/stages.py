"""The stage graph as data: what each stage reads of the config, and which files and facts go in."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from configs.schema import NightConfig
from configs.schema.models import QUICKSTART_BASE
from tasks.function_sources import source_digest
from tasks.launch_plan import MODULES, ROOT
from training.contract import FileRef, StageResult, StageSpec
from training.errors import ContractError

__all__ = ["Materials", "NightFacts", "StageSpec", "builds_own_base", "code_version", "spec_of", "stages_of"]

STORE = "trajectories"


@dataclass(frozen=True)
class Role:
    """An input of a stage: its name in the spec, and the material that fills it."""

    name: str
    material: str
    optional: bool = False

    @classmethod
    def named(cls, name: str) -> Role:
        """A required role that is called like its material."""
        return cls(name, name)


@dataclass(frozen=True)
class Shape:
    """A stage: config sections that decide its result, inputs, small facts, and which output becomes which material.

    `seed`: whose draws it makes. config: the same ones every night; data: others when the data are others; night:
    others every night.
    """

    sections: tuple[str, ...]
    roles: tuple[Role, ...] = ()
    params: tuple[str, ...] = ()
    makes: tuple[tuple[str, str], ...] = ()
    seed: Literal["config", "data", "night"] = "config"


@dataclass(frozen=True)
class Materials:
    """The files of a night, as far as they exist yet. `reward_model` is the one the policy is trained against: the
    student, or the teacher where there is no student. `validation`: the report on the night's rows. The champion's
    files are those frozen at the night's start."""

    frozen_evaluation: FileRef | None = None
    snapshot: FileRef | None = None
    validation: FileRef | None = None
    base: FileRef | None = None
    reference: FileRef | None = None
    teacher_base: FileRef | None = None
    student_base: FileRef | None = None
    teacher: FileRef | None = None
    reward_model: FileRef | None = None
    continued_student: FileRef | None = None
    view: FileRef | None = None
    policy: FileRef | None = None
    adapter: FileRef | None = None
    champion: FileRef | None = None
    warm_policy: FileRef | None = None
    warm_adapter: FileRef | None = None
    report: FileRef | None = None
    answers: FileRef | None = None

    def get(self, name: str) -> FileRef | None:
        """The material called `name`."""
        found: FileRef | None = getattr(self, name)
        return found

    def with_reference(self, reference: FileRef | None) -> Materials:
        """The materials with another reference, or another place of the same one."""
        return replace(self, reference=reference)

    def after(self, stage: str, result: StageResult) -> Materials:
        """The materials with what `stage` has made."""
        made: dict[str, FileRef] = {}
        for output, material in SHAPES[stage].makes:
            if output in result.outputs:
                made[material] = result.outputs[output]
        return replace(self, **made)


_SNAPSHOT = Role.named("snapshot")
_REFERENCE = Role.named("reference")
_REWARD_MODEL = Role("reward_model", "reward_model", optional=True)

SHAPES: Mapping[str, Shape] = {
    "validate": Shape(
        ("data",),
        (Role("frozen_evaluation", "frozen_evaluation", optional=True),),
        params=("fingerprint", "source"),
        makes=(("snapshot", "snapshot"), ("report", "validation")),
    ),
    "base": Shape(("data", "models"), (_SNAPSHOT,), makes=(("model", "base"),)),
    "sft": Shape(("models", "sft"), (_SNAPSHOT, Role.named("base")), makes=(("model", "reference"),), seed="data"),
    "reward": Shape(
        ("models", "reward"),
        (_SNAPSHOT, _REFERENCE, Role("teacher_base", "teacher_base", optional=True)),
        makes=(("reward_model", "teacher"), ("reward_model", "reward_model")),
        seed="data",
    ),
    "distill": Shape(
        ("models", "distill"),
        (
            _SNAPSHOT,
            _REFERENCE,
            Role.named("teacher"),
            Role("student_base", "student_base", optional=True),
            Role("adapter", "continued_student", optional=True),
        ),
        makes=(("reward_model", "reward_model"),),
        seed="data",
    ),
    "annotate": Shape(
        ("models", "reward", "replay", "rollout"),
        (_SNAPSHOT, _REFERENCE, _REWARD_MODEL),
        params=("store", "night_index", "reward_source"),
        makes=(("view", "view"),),
    ),
    "ppo": Shape(
        ("models", "reward", "rollout", "replay", "ppo", "guards", "evaluation"),
        (
            _SNAPSHOT,
            _REFERENCE,
            Role.named("view"),
            _REWARD_MODEL,
            Role("adapter", "warm_adapter", optional=True),
            Role("policy", "warm_policy", optional=True),
        ),
        params=("store", "night_index", "reward_source"),
        makes=(("policy", "policy"), ("adapter", "adapter")),
        seed="night",
    ),
    "evaluate": Shape(
        ("models", "reward", "evaluation"),
        (
            _SNAPSHOT,
            _REFERENCE,
            Role("challenger", "policy"),
            Role("champion", "champion", optional=True),
            Role("student", "reward_model", optional=True),
            Role("teacher", "teacher", optional=True),
            Role("validation", "validation", optional=True),
        ),
        params=("confidence_levels", "reward_source", "gold_source"),
        makes=(("report", "report"), ("answers", "answers")),
        seed="night",
    ),
}
"""Every stage that runs as a child, in the order of a whole night. Gate and promotion follow in the flow's process."""


def stages_of(config: NightConfig, reference_known: bool, base_needed: bool, sft_wanted: bool) -> list[str]:
    """The stages of this night, in order. With a known reference there is neither base nor sft."""
    wanted = ["validate"]
    if not reference_known:
        wanted += ["base"] if base_needed else []
        wanted += ["sft"] if sft_wanted else []
    if config.reward.kind == "model":
        wanted += ["reward", "distill"] if config.distill.enabled else ["reward"]
    return [*wanted, "annotate", "ppo", "evaluate"]


def builds_own_base(config: NightConfig) -> bool:
    """Whether the base is the quickstart's tiny model, which a stage makes."""
    return config.models.base == QUICKSTART_BASE


@dataclass(frozen=True)
class NightFacts:
    """What every spec of a night shares. `seeds`: those of the night and of its data; null or absent: the config's."""

    night: str
    index: int
    home: Path
    fingerprint: str
    source: str
    config: NightConfig
    seeds: Mapping[str, int | None] = field(default_factory=dict)

    def seed(self, whose: str) -> int:
        """The seed of a stage that draws for `whose`: config, data or night."""
        found = self.seeds.get(whose)
        return self.config.seed if found is None else found


def spec_of(stage: str, facts: NightFacts, materials: Materials) -> StageSpec:
    """The spec of a stage. Raises ContractError when a required material is missing."""
    shape = SHAPES[stage]
    inputs: dict[str, FileRef] = {}
    for role in shape.roles:
        material = materials.get(role.material)
        if material is not None:
            inputs[role.name] = material
        elif not role.optional:
            raise ContractError(f"stage {stage} needs {role.material}, which no stage of this night has made")
    config = facts.config.model_dump(mode="json")
    return StageSpec(
        stage=stage,
        night=facts.night,
        home=str(facts.home),
        seed=facts.seed(shape.seed),
        config={name: config[name] for name in shape.sections},
        inputs=inputs,
        params={name: _param(name, facts, inputs) for name in shape.params},
        code_version=code_version(MODULES.get(stage, "training")),
    )


def _param(name: str, facts: NightFacts, inputs: Mapping[str, FileRef]) -> Any:
    config = facts.config
    found: dict[str, Any] = {
        "night_index": facts.index,
        "fingerprint": facts.fingerprint,
        "source": facts.source,
        "store": str(facts.home / STORE / config.name / _store_name(inputs)),
        "confidence_levels": sorted({config.evaluation.confidence, *config.gates.confidence_levels}),
    }
    return found[name] if name in found else function_facts(config)[name]


def function_facts(config: NightConfig) -> dict[str, str | None]:
    """Digests of the user's own functions: the reward's and the gold reward's; null where there is none."""
    reward = config.reward.function if config.reward.kind == "function" else None
    return {"reward_source": source_digest(reward), "gold_source": source_digest(config.evaluation.gold_function)}


def _store_name(inputs: Mapping[str, FileRef]) -> str:
    """A chain's trajectories lie by its reference: token ids of another tokenizer mean nothing, and no chain ages
    another's rows."""
    return inputs["reference"].sha256[:16] if "reference" in inputs else "none"


@functools.cache
def code_version(package: str = "training") -> str:
    """Version of the code that computes a stage: the release, and a digest of the sources of `package` and below it."""
    digest = hashlib.sha256()
    packages = ("configs", "training") if package == "training" else ("configs", "training", package)
    for file in sorted(file for name in packages for file in (ROOT / name).rglob("*.py")):
        digest.update(f"{file.relative_to(ROOT).as_posix()}\0".encode() + file.read_bytes())
    return f"{_release()}+{digest.hexdigest()[:16]}"


def _release() -> str:
    try:
        return importlib.metadata.version("nightjar-rlhf")
    except importlib.metadata.PackageNotFoundError:
        return "0"

