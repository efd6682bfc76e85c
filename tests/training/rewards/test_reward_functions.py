"""Finding a reward function: built in by name, a user's own only from the allow-list."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.errors import ConfigError
from training.rewards.functions import BUILT_IN, resolve_reward_function


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_rewards.py").write_text(
        "from pathlib import Path\n"
        f"Path({str(tmp_path / 'imported')!r}).touch()\n"
        "NUMBER = 3\n"
        "def brevity(prompt, response, reference):\n    return -float(len(response))\n"
    )
    (tmp_path / "broken_rewards.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return str(tmp_path)


def test_built_in_names() -> None:
    assert set(BUILT_IN) == {"gsm8k", "quickstart"}
    assert resolve_reward_function("gsm8k") is BUILT_IN["gsm8k"]


def test_own_function_from_the_allow_list(own_module: str) -> None:
    function = resolve_reward_function("own_rewards:brevity", ["own_rewards:brevity"])
    assert function([], "four", None) == -4.0


def test_nothing_outside_the_list_is_imported(own_module: str) -> None:
    with pytest.raises(ConfigError, match=r"not in reward\.allowed_functions") as caught:
        resolve_reward_function("own_rewards:brevity", ["own_rewards:other"])
    assert "reward.allowed_functions: ['own_rewards:brevity']" in str(caught.value.hint)
    assert not (Path(own_module) / "imported").exists()


@pytest.mark.parametrize("name", ["gsm8", "os.system", "a:b:c", "a b:c", "../x:y", ":f", "m:", ""])
def test_names_that_are_neither(name: str) -> None:
    with pytest.raises(ConfigError, match="neither built in"):
        resolve_reward_function(name, [name])


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_such_module_anywhere:f", "cannot be imported: ModuleNotFoundError"),
        ("broken_rewards:f", "cannot be imported: RuntimeError: no licence"),
        ("own_rewards:missing", "has no function missing"),
        ("own_rewards:NUMBER", "has no function NUMBER"),
    ],
)
def test_paths_that_lead_nowhere(own_module: str, path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve_reward_function(path, [path])
