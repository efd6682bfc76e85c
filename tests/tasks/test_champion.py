"""What a night takes over from the champion it starts from, and when it must not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.schema import NightConfig
from tasks.champion import QUICKSTART, base_identity, keep_lineage, lineage_tags, starting_materials
from tasks.model_store import find_model, keep_model
from tasks.night_state import FrozenChampion
from tasks.stages import Materials
from training.contract import FileRef, file_ref


def folder(place: Path, content: str, **files: str) -> FileRef:
    place.mkdir(parents=True)
    (place / "weights").write_text(content)
    for name, text in files.items():
        (place / f"{name}.json").write_text(text)
    return file_ref(place)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def base(tmp_path: Path) -> FileRef:
    return folder(tmp_path / "base", "base")


def config_of(base: FileRef | None, **sections) -> NightConfig:
    models = {"base": base.path if base else "quickstart", "max_prompt_length": 64, "max_response_length": 64}
    data = {"source": "d"} if base else {"quickstart": {}}
    gates = {"rules": [{"metric": "reward", "min": 0.0}]}
    content = {"data": data, "models": models, "gates": gates, "ppo": {"lora_rank": 8}} | sections
    return NightConfig.model_validate(content)


def champion_of(tmp_path: Path, home: Path, base_identity: str, rank: int = 8) -> FrozenChampion:
    reference = keep_model(home, folder(tmp_path / "reference", "reference"))
    student = keep_model(home, folder(tmp_path / "student", "student"))
    model = folder(tmp_path / "champion" / "model", "champion")
    adapter = folder(tmp_path / "champion" / "adapter", "adapter", adapter_config=json.dumps({"r": rank}))
    return FrozenChampion(
        version="4", digest=model.sha256, model=model.path, adapter=adapter.path,
        reference_sha256=reference.sha256, base_sha256=base_identity, reward_model_sha256=student.sha256,
    )  # fmt: skip


def test_cold_start_has_the_base_alone(home: Path, base: FileRef) -> None:
    materials = starting_materials(config_of(base), home, None, None)
    assert materials == Materials(base=base)
    assert starting_materials(config_of(None), home, None, None) == Materials()


def test_warm_start_takes_reference_and_adapter(tmp_path: Path, home: Path, base: FileRef) -> None:
    champion = champion_of(tmp_path, home, base.sha256)
    materials = starting_materials(config_of(base), home, champion, champion)
    assert materials.reference is not None
    assert materials.reference.sha256 == champion.reference_sha256
    assert materials.warm_adapter is not None
    assert materials.warm_policy is None
    assert materials.champion is not None
    assert materials.champion.sha256 == champion.digest


@pytest.mark.parametrize(("rank", "wanted"), [(16, 8), (8, 0)])
def test_an_adapter_that_does_not_fit_gives_way_to_the_merged_policy(
    tmp_path: Path, home: Path, base: FileRef, rank: int, wanted: int
) -> None:
    champion = champion_of(tmp_path, home, base.sha256, rank)
    materials = starting_materials(config_of(base, ppo={"lora_rank": wanted}), home, champion, champion)
    assert materials.warm_adapter is None
    assert materials.warm_policy is not None


def test_another_base_or_sft_every_night_breaks_the_chain_but_keeps_the_judge(
    tmp_path: Path, home: Path, base: FileRef
) -> None:
    champion = champion_of(tmp_path, home, "another base")
    for config in (config_of(base), config_of(base, sft={"run": "always"})):
        materials = starting_materials(config, home, champion, champion)
        assert (materials.reference, materials.warm_adapter, materials.warm_policy) == (None, None, None)
        assert materials.champion is not None, "it is still judged against the champion"


def test_a_lost_reference_is_not_replaced_by_something_like_it(tmp_path: Path, home: Path, base: FileRef) -> None:
    champion = champion_of(tmp_path, home, base.sha256)
    (home / "models" / str(champion.reference_sha256) / "weights").unlink()
    assert starting_materials(config_of(base), home, champion, champion).reference is None


def test_the_base_itself_may_be_the_reference(tmp_path: Path, home: Path, base: FileRef) -> None:
    champion = champion_of(tmp_path, home, base.sha256).model_copy(update={"reference_sha256": base.sha256})
    assert starting_materials(config_of(base), home, champion, champion).reference == base


def test_student_to_continue_from_must_be_an_adapter(tmp_path: Path, home: Path, base: FileRef) -> None:
    champion = champion_of(tmp_path, home, base.sha256)
    config = config_of(base, distill={"continue_from": "champion"})
    assert starting_materials(config, home, champion, champion).continued_student is None
    student = tmp_path / "student2"
    student.mkdir()
    (student / "adapter_model.safetensors").write_text("a")
    kept = keep_model(home, file_ref(student))
    champion = champion.model_copy(update={"reward_model_sha256": kept.sha256})
    assert starting_materials(config, home, champion, champion).continued_student == kept
    assert starting_materials(config, home, None, None).continued_student is None


def test_lineage_is_kept_and_named(tmp_path: Path, home: Path, base: FileRef) -> None:
    reference, student = folder(tmp_path / "r", "r"), folder(tmp_path / "s", "s")
    materials = Materials(base=base, reference=reference, reward_model=student)
    keep_lineage(home, materials)
    assert find_model(home, reference.sha256) is not None
    assert find_model(home, student.sha256) is not None
    tags = lineage_tags(materials, base_identity(config_of(base), base))
    assert set(tags.values()) == {reference.sha256, base.sha256}
    assert base_identity(config_of(None), None) == QUICKSTART
