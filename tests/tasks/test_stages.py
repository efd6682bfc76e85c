"""The stage graph: who gets what, and when a result may be used again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from configs.schema import NightConfig
from tasks.stages import SHAPES, Materials, NightFacts, builds_own_base, code_version, spec_of, stages_of
from training.__main__ import STAGES as TRAINING_STAGES
from training.contract import FileRef, StageResult
from training.errors import ContractError


def config_of(**sections) -> NightConfig:
    content = {
        "data": {"source": "d"},
        "models": {"base": "m", "max_prompt_length": 64, "max_response_length": 64},
        "gates": {"rules": [{"metric": "reward", "min": 0.0, "confidence": 0.9}]},
    } | sections
    return NightConfig.model_validate(content)


def facts(config: NightConfig | None = None, home: str = "/h", index: int = 1) -> NightFacts:
    return NightFacts("n-0001", index, Path(home), "print", "d", config or config_of())


def ref(name: str) -> FileRef:
    return FileRef(f"/{name}", name, 1)


FULL = Materials(**{name: ref(name) for name in Materials.__dataclass_fields__})


def test_every_stage_of_training_and_validate_has_a_shape() -> None:
    assert set(SHAPES) == set(TRAINING_STAGES) | {"validate"}


def test_order_of_a_whole_night_and_of_its_variants() -> None:
    usual = ["validate", "sft", "reward", "distill", "annotate", "ppo", "evaluate"]
    assert stages_of(config_of(), reference_known=False, base_needed=False, sft_wanted=True) == usual
    later = stages_of(config_of(), reference_known=True, base_needed=True, sft_wanted=True)
    assert later == [stage for stage in usual if stage != "sft"]
    own = stages_of(config_of(), reference_known=False, base_needed=True, sft_wanted=True)
    assert own[:3] == ["validate", "base", "sft"]
    teacher_only = config_of(distill={"enabled": False})
    assert "distill" not in stages_of(teacher_only, True, False, False)
    rule = config_of(reward={"kind": "function", "function": "gsm8k"})
    assert stages_of(rule, True, False, False) == ["validate", "annotate", "ppo", "evaluate"]


def test_order_respects_what_each_stage_needs() -> None:
    made = {"base"} if not builds_own_base(config_of()) else set()
    for stage in stages_of(config_of(), reference_known=False, base_needed=False, sft_wanted=True):
        needed = {role.material for role in SHAPES[stage].roles if not role.optional}
        assert needed <= made, f"{stage} needs {needed - made}"
        made |= {material for _, material in SHAPES[stage].makes}


@pytest.mark.parametrize("stage", sorted(SHAPES))
def test_spec_holds_the_named_sections_and_roles(stage: str) -> None:
    spec = spec_of(stage, facts(), FULL)
    assert set(spec.config) == set(SHAPES[stage].sections)
    assert {name: got.sha256 for name, got in spec.inputs.items()} == {r.name: r.material for r in SHAPES[stage].roles}
    assert set(spec.params) == set(SHAPES[stage].params)


@pytest.mark.parametrize("stage", sorted(SHAPES))
def test_missing_material_is_named_and_optional_ones_are_left_out(stage: str) -> None:
    required = {role.material for role in SHAPES[stage].roles if not role.optional}
    bare = Materials(**{name: ref(name) for name in required})
    assert set(spec_of(stage, facts(), bare).inputs) == {r.name for r in SHAPES[stage].roles if not r.optional}
    for name in required:
        with pytest.raises(ContractError, match=name):
            spec_of(stage, facts(), replace(bare, **{name: None}))


def test_key_follows_what_decides_the_result_and_nothing_else() -> None:
    key = spec_of("ppo", facts(), FULL).key
    assert spec_of("ppo", facts(config_of(name="renamed", registry={"model": "x"})), FULL).key == key
    assert spec_of("ppo", facts(config_of(sft={"epochs": 3})), FULL).key == key, "sft's settings act through its output"
    assert spec_of("ppo", facts(config_of(ppo={"actor_lr": 1e-5})), FULL).key != key
    assert spec_of("ppo", facts(config_of(seed=1)), FULL).key != key
    assert spec_of("ppo", facts(), replace(FULL, reference=ref("another"))).key != key
    moved = replace(FULL, reference=FileRef("/elsewhere", "reference", 1))
    assert spec_of("ppo", facts(), moved).key == key, "content counts, not place"


def test_evaluation_gives_the_levels_that_the_gate_asks_for() -> None:
    assert spec_of("evaluate", facts(), FULL).params["confidence_levels"] == [0.9, 0.95]


def test_outputs_become_materials_and_the_student_replaces_the_teacher() -> None:
    def result(stage: str, **outputs: FileRef) -> StageResult:
        return StageResult(stage, "k", outputs, {}, {}, 1.0, {})

    materials = Materials().after("reward", result("reward", reward_model=ref("t"), calibration=ref("c")))
    assert (materials.teacher, materials.reward_model) == (ref("t"), ref("t"))
    materials = materials.after("distill", result("distill", reward_model=ref("s")))
    assert (materials.teacher, materials.reward_model) == (ref("t"), ref("s"))
    assert materials.after("ppo", result("ppo", policy=ref("p"))).adapter is None


def test_code_version_changes_with_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks import stages

    for package in ("configs", "training", "tasks"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    code_version.cache_clear()
    before, with_tasks = code_version(), code_version("tasks")
    code_version.cache_clear()
    (tmp_path / "tasks" / "a.py").write_text("x = 2\n")
    assert code_version() == before, "a stage of training does not depend on tasks"
    assert code_version("tasks") != with_tasks
    code_version.cache_clear()
