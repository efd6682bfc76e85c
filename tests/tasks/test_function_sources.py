"""A user's own reward function is part of the key: changing it must not find an old result."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.schema import NightConfig
from tasks.function_sources import source_digest
from tasks.stages import NightFacts, spec_of
from tests.tasks.test_stages import FULL
from training.errors import ConfigError

MINE = "my_nightjar_rewards:brevity"
JUDGED = {"annotate", "ppo", "evaluate"}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module of the user's, on the path and not imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "my_nightjar_rewards.py"
    file.write_text("def brevity(prompt, answer, reference):\n    return -len(answer)\n")
    yield file
    sys.modules.pop("my_nightjar_rewards", None)


def keys(**sections) -> dict[str, str]:
    content = {
        "data": {"source": "d"},
        "models": {"base": "m", "max_prompt_length": 64, "max_response_length": 64},
        "gates": {"rules": [{"metric": "reward", "min": 0.0}]},
    } | sections
    config = NightConfig.model_validate(content)
    facts = NightFacts("n-0001", 1, Path("/h"), "print", "d", config)
    return {stage: spec_of(stage, facts, FULL).key for stage in ("validate", "sft", "annotate", "ppo", "evaluate")}


def reward(function: str) -> dict:
    return {"reward": {"kind": "function", "function": function, "allowed_functions": [MINE]}}


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {stage for stage in before if before[stage] != after[stage]}


def test_a_changed_function_changes_the_key_of_every_stage_that_asks_it(module: Path) -> None:
    before = keys(**reward(MINE))
    assert keys(**reward(MINE)) == before
    module.write_text(module.read_text().replace("-len(answer)", "-2.0 * len(answer)"))
    assert changed(before, keys(**reward(MINE))) == JUDGED


def test_also_when_the_old_one_is_imported_already(module: Path) -> None:
    from training.rewards.functions import resolve_reward_function

    resolve_reward_function(MINE, [MINE])
    before = keys(**reward(MINE))
    module.write_text(module.read_text() + "# mended\n")
    assert changed(before, keys(**reward(MINE))) == JUDGED


def test_a_changed_gold_function_changes_the_evaluation_alone(module: Path) -> None:
    asked = {"reward": {"allowed_functions": [MINE]}, "evaluation": {"gold_function": MINE}}
    before = keys(**asked)
    module.write_text(module.read_text() + "# mended\n")
    assert changed(before, keys(**asked)) == {"evaluate"}


def test_a_package_counts_with_all_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "my_nightjar_package"
    folder.mkdir()
    for name in ("__init__.py", "words.py"):
        (folder / name).write_text("x = 1\n")
    before = source_digest("my_nightjar_package:score")
    (folder / "words.py").write_text("x = 2\n")
    assert source_digest("my_nightjar_package:score") != before


def test_finding_the_source_does_not_run_it(module: Path) -> None:
    module.write_text("raise SystemExit\n")
    assert source_digest(MINE)


def test_built_in_functions_and_none_have_no_source_of_their_own() -> None:
    assert source_digest("gsm8k") is None
    assert source_digest(None) is None


@pytest.mark.parametrize("function", ["no_such_module_at_all:f", "no.such.package:f", "sys:exit"])
def test_what_has_no_source_is_named_with_the_way_out(function: str) -> None:
    with pytest.raises(ConfigError, match="PYTHONPATH"):
        source_digest(function)
