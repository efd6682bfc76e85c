"""The seam of a stage: a spec in, a result out, and nothing believed that its hash does not bear out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema.models import ModelsConfig
from tests.training.forks import KILLED, kill_at_call, run_forked
from training import contract
from training.contract import (
    RESULT,
    SPEC,
    FileRef,
    StageResult,
    StageSpec,
    file_ref,
    read_json,
    read_result,
    read_spec,
    valid_result,
    write_json,
    write_result,
    write_spec,
)
from training.errors import ContractError

SPEC_A = StageSpec(
    stage="sft", night="n1", home="h", seed=1, config={"models": {"base": "x"}},
    inputs={"snapshot": FileRef("p", "aa", 3)}, params={"k": 1}, code_version="v",
)  # fmt: skip


def folder(root: Path) -> Path:
    (root / "out" / "sub").mkdir(parents=True)
    (root / "out" / "a.txt").write_text("one")
    (root / "out" / "sub" / "b.txt").write_text("two")
    return root / "out"


def finished(root: Path, key: str = "k") -> tuple[Path, StageResult]:
    out = folder(root)
    result = StageResult(
        "sft", key, {"model": file_ref(out)}, {"loss": 1.0, "bad": None}, {"n": 2}, 1.5, {"torch": "2"}
    )
    write_result(root, result)
    return root, result


def test_a_spec_survives_disk_key_and_all(tmp_path: Path):
    write_spec(tmp_path / "stage", SPEC_A)
    again = read_spec(tmp_path / "stage")
    assert again == SPEC_A
    assert again.key == SPEC_A.key == read_json(tmp_path / "stage" / SPEC)["key"]


@pytest.mark.parametrize(
    "change",
    [
        {"stage": "reward"}, {"seed": 2}, {"config": {"models": {"base": "y"}}}, {"params": {"k": 2}},
        {"inputs": {"snapshot": FileRef("p", "bb", 3)}}, {"inputs": {"other": FileRef("p", "aa", 3)}},
        {"code_version": "w"},
    ],
)  # fmt: skip
def test_what_decides_the_result_decides_the_key(change: dict):
    assert replace(SPEC_A, **change).key != SPEC_A.key


@pytest.mark.parametrize("change", [{"night": "n2"}, {"home": "i"}, {"inputs": {"snapshot": FileRef("q", "aa", 3)}}])
def test_places_and_names_do_not(change: dict):
    assert replace(SPEC_A, **change).key == SPEC_A.key


def test_a_section_comes_typed():
    assert SPEC_A.section("models", ModelsConfig).base == "x"
    with pytest.raises(ContractError, match=r"spec of stage sft: config has no section 'ppo'"):
        SPEC_A.section("ppo", ModelsConfig)


@pytest.mark.parametrize(
    ("content", "message"), [("{", "not valid JSON"), ('{"stage": "sft"}', "not a stage spec"), (None, "missing")]
)
def test_a_spec_that_is_none_is_named(tmp_path: Path, content: str | None, message: str):
    if content is not None:
        (tmp_path / SPEC).write_text(content)
    with pytest.raises(ContractError, match=message) as error:
        read_spec(tmp_path)
    assert str(tmp_path / SPEC) in str(error.value)


@pytest.mark.parametrize("content", ["[]", '"text"', '{"inputs": []}', '{"inputs": {"a": {"path": 1}}}'])
def test_json_of_another_shape_is_no_spec_and_no_result(tmp_path: Path, content: str):
    for name, read in ((SPEC, read_spec), (RESULT, read_result)):
        (tmp_path / name).write_text(content.replace("inputs", "outputs") if name == RESULT else content)
        with pytest.raises(ContractError, match=name):
            read(tmp_path)
    assert valid_result(tmp_path, "k") is None


def test_a_result_survives_disk(tmp_path: Path):
    root, result = finished(tmp_path)
    assert read_result(root) == result
    assert valid_result(root, "k") == result
    assert result.output("model").size == 6
    with pytest.raises(ContractError, match=r"stage sft has no output 'policy'; it has model"):
        result.output("policy")


def test_no_result_or_one_of_another_key_is_not_valid(tmp_path: Path):
    assert valid_result(tmp_path, "k") is None
    root, _ = finished(tmp_path / "x")
    assert valid_result(root, "other") is None


def _append(out: Path) -> None:
    (out / "a.txt").write_text("oneX")


def _swap(out: Path) -> None:
    (out / "a.txt").write_text("two")
    (out / "sub" / "b.txt").write_text("one")


def _rename(out: Path) -> None:
    (out / "a.txt").rename(out / "c.txt")


def _add(out: Path) -> None:
    (out / "new.txt").write_text("")


def _remove(out: Path) -> None:
    (out / "sub" / "b.txt").unlink()


@pytest.mark.parametrize("tamper", [_append, _swap, _rename, _add, _remove])
def test_an_output_that_changed_is_not_valid(tmp_path: Path, tamper):
    root, result = finished(tmp_path)
    tamper(root / "out")
    assert valid_result(root, "k") is None
    with pytest.raises(ContractError, match="content changed"):
        result.output("model").verify()


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(ContractError, match="no such file or folder"):
        file_ref(tmp_path / "none")


def test_the_place_of_a_folder_does_not_matter(tmp_path: Path):
    assert file_ref(folder(tmp_path / "x")).sha256 == file_ref(folder(tmp_path / "y")).sha256


names = st.text("ab/", min_size=1, max_size=4).filter(lambda n: all(n.split("/")))


@settings(deadline=None, max_examples=40)
@given(
    first=st.dictionaries(names, st.binary(max_size=3), max_size=3),
    second=st.dictionaries(names, st.binary(max_size=3), max_size=3),
)
def test_a_folders_digest_tells_every_content_apart(tmp_path_factory: pytest.TempPathFactory, first, second):
    digests = []
    for files in (first, second):
        root = tmp_path_factory.mktemp("folder")
        for name, content in files.items():
            place = root.joinpath(*[f"d{part}" for part in name.split("/")[:-1]], "f" + name.split("/")[-1])
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        digests.append(file_ref(root).sha256)
    assert (digests[0] == digests[1]) == (first == second)


def test_numbers_that_are_not_json_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "x.json", {"loss": float("nan")})
    assert list(tmp_path.iterdir()) == [], "half a file stayed, and would be part of a folder's digest"


@pytest.mark.parametrize("act", ["fsync", "replace"])
def test_json_is_written_whole_or_not_at_all(tmp_path: Path, act: str):
    file = tmp_path / "x.json"
    write_json(file, {"old": 1})

    def work() -> None:
        setattr(contract.os, act, kill_at_call(1, getattr(contract.os, act)))
        write_json(file, {"new": list(range(5_000))})

    assert run_forked(work) == KILLED
    assert read_json(file) == {"old": 1}
    write_json(file, {"new": 2})
    assert json.loads(file.read_text()) == {"new": 2}
