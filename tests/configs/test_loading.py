"""From YAML to a typed config, and every way in which that is refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from configs.schema import ConfigError, load_config, preset_names
from tests.configs.written import MINIMAL, refusal, written


def test_minimal_config_takes_defaults(tmp_path: Path) -> None:
    config = load_config(written(tmp_path))
    assert config.ppo.clip_ratio == 0.2
    assert config.name == "nightjar"


def test_overrides_reach_nested_keys_and_keep_their_neighbours(tmp_path: Path) -> None:
    config = load_config(written(tmp_path), ["ppo.actor_lr=1e-5", "ppo.kl_ctrl.target_kl=0.2", "data.max_rows=100"])
    assert config.ppo.actor_lr == 1e-5
    assert config.ppo.kl_ctrl.target_kl == 0.2
    assert config.ppo.kl_ctrl.kl_coef == 0.05
    assert config.data.source == "pairs.jsonl"


def test_overrides_replace_lists_whole(tmp_path: Path) -> None:
    config = load_config(written(tmp_path), ["gates.rules=[{metric: kl_ref, max: 0.3}]"])
    assert [rule.metric for rule in config.gates.rules] == ["kl_ref"]


@pytest.mark.parametrize("override", ["ppo.actor_lr", "=3", "  =3"])
def test_an_override_of_another_shape_is_refused(tmp_path: Path, override: str) -> None:
    assert "key.path=value" in refusal(written(tmp_path), override)


def test_preset_lies_under_the_file(tmp_path: Path) -> None:
    wide = {"base": "model", "max_response_length": 100}
    config = load_config(written(tmp_path, preset="data_efficient", ppo={"lam": 0.9}, models=wide))
    assert (config.ppo.gamma, config.ppo.lam, config.ppo.kl_loss_type) == (0.99, 0.9, "k1+")
    assert (config.models.max_prompt_length, config.models.max_response_length) == (1024, 100)


def test_unknown_preset_names_the_known_ones(tmp_path: Path) -> None:
    told = refusal(written(tmp_path, preset="turbo"))
    assert all(name in told for name in preset_names())


def test_unknown_key_is_named_with_the_likely_one(tmp_path: Path) -> None:
    told = refusal(written(tmp_path, ppo={"cliprange": 0.2, "clip_ration": 0.2}))
    assert "ppo.clip_ration" in told
    assert "did you mean `clip_ratio`?" in told
    assert "ppo.cliprange" in told, "every problem is told at once"


def test_misspelt_section_lists_the_sections(tmp_path: Path) -> None:
    told = refusal(written(tmp_path, guard={}))
    assert "did you mean `guards`?" in told


def test_missing_section_is_named(tmp_path: Path) -> None:
    path = tmp_path / "night.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in MINIMAL.items() if k != "models"}))
    assert "models: this key is required" in refusal(path)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("ppo.ppo_mini_batch_size=1000", "exceeds ppo.train_batch_size"),
        ("ppo.critic_warmup_rounds=4", "leaves no round for the policy"),
        ("ppo.ppo_max_token_len=100", "less than one longest row"),
        ("reward.max_tokens_per_microbatch=255", "the longest pair, whose two rows go together"),
        ("distill.max_tokens_per_microbatch=255", "write at least 256"),
        ("reward.kind=function", "reward.function is empty"),
        ("runtime.nnodes=2", "rdzv_endpoint"),
        ("ppo.actor_lr=-1", "ppo.actor_lr"),
        ("ppo.actor_lr=.nan", "ppo.actor_lr"),
        ("gates.rules=[]", "no gate rules"),
        ("name=two words", "name"),
    ],
)
def test_nonsense_is_refused_with_its_reason(tmp_path: Path, override: str, words: str) -> None:
    assert words in refusal(written(tmp_path), override)


def test_missing_file_and_broken_yaml(tmp_path: Path) -> None:
    assert "no such config file" in refusal(tmp_path / "nothing.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("data: [unclosed")
    assert "not readable as YAML" in refusal(broken)
    broken.write_text("- a list")
    assert "must be a mapping" in refusal(broken)


def test_hash_follows_content_and_not_the_home(tmp_path: Path) -> None:
    path = written(tmp_path)
    plain = load_config(path).config_hash
    assert load_config(path, ["runtime.home=/elsewhere"]).config_hash == plain
    operational = [
        "runtime.stage_timeout_minutes=9999", "runtime.retries=7", "runtime.threads=3", "runtime.lease_seconds=90",
        "registry.reach_timeout_seconds=60", "registry.lock_wait_seconds=90", "registry.verify_timeout_minutes=60",
        "watch.patience=9", "watch.limits=[{metric: reward, min: 0}]",
    ]  # fmt: skip
    for override in (*operational, operational):
        overrides = [override] if isinstance(override, str) else override
        assert load_config(path, overrides).config_hash == plain, override
    for override in ("seed=1", "ppo.rounds=3", "evaluation.prompts=99", "registry.model=another", "data.min_rows=3"):
        assert load_config(path, [override]).config_hash != plain, override


def test_config_is_frozen(tmp_path: Path) -> None:
    config = load_config(written(tmp_path))
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3


def test_a_preset_may_be_chosen_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    path, of_file = written(tmp_path), written(tmp_path / "other", preset="stable")
    assert load_config(path, ["preset=stable"]) == load_config(of_file)
    assert load_config(of_file, ["preset=data_efficient"]) == load_config(path, ["preset=data_efficient"])
    assert load_config(of_file, ["preset=null"]) == load_config(path)
    assert load_config(path, ["ppo.rounds=3", "preset=stable"]).ppo.rounds == 3, "a preset lies under everything else"
    assert "write one of data_efficient, stable" in refusal(path, "preset=stabel")


def test_a_tilde_means_the_same_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    paths = ("data.source", "models.base", "models.teacher", "models.student", "distill.continue_from")
    config = load_config(written(tmp_path), [f"{key}=~/x" for key in paths])
    for key in paths:
        section, name = key.split(".")
        assert getattr(getattr(config, section), name) == "/home/ada/x", key
    assert load_config(written(tmp_path), ["data.source=s3://bucket/~/x"]).data.source == "s3://bucket/~/x"
    assert load_config(written(tmp_path), ["distill.continue_from=champion"]).distill.continue_from == "champion"


def test_a_file_that_cannot_be_read_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "night.yaml"
    file.write_text("name: n")

    def refused(self: Path, **named: object) -> str:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_text", refused)
    with pytest.raises(ConfigError, match=r"night\.yaml: cannot be read: Permission denied"):
        load_config(file)


@pytest.mark.parametrize("text", ["name: a\nname: b\n", "ppo:\n  rounds: 1\n  rounds: 2\n", "gates: {}\ngates: {}\n"])
def test_a_key_that_stands_twice_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "night.yaml"
    path.write_text(text)
    words = refusal(path)
    assert "stands twice" in words
    assert "line" in words


@pytest.mark.parametrize(
    "value", ["2026-13-45", "!!int x", "!!bool x", "!!timestamp x", "2026-11-30 25:00:00", "9" * 5000, "[" * 3000]
)
def test_a_value_that_yaml_cannot_make_is_refused_with_its_place(tmp_path: Path, value: str) -> None:
    path = tmp_path / "night.yaml"
    path.write_text(f"seed: 1\nname: {value}\n")
    told = refusal(path)
    assert "night.yaml: not readable as YAML" in told
    assert "line 2, column" in told
    told = refusal(written(tmp_path), f"name={value}")
    assert "override 'name=" in told
    assert "the value is not YAML: " in told


def test_an_override_says_why_its_value_is_not_yaml(tmp_path: Path) -> None:
    assert "'2026-13-45' is read as timestamp" in refusal(written(tmp_path), "name=2026-13-45")
    assert "write it in quotes" in refusal(written(tmp_path), "name=2026-13-45")
    assert "the key 'n' stands twice" in refusal(written(tmp_path), "rollout={n: 1, n: 2}")


def test_a_list_as_a_key_is_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "night.yaml"
    path.write_text("? [a, b]\n: 1\n")
    assert "night.yaml" in refusal(path)


def test_a_folder_as_config_names_the_files_in_it(tmp_path: Path) -> None:
    assert "a folder, not a config file" in refusal(tmp_path)
    written(tmp_path)
    told = refusal(tmp_path)
    assert f"e.g. {tmp_path / 'night.yaml'}" in told


def test_a_file_in_another_encoding_is_named_with_the_place(tmp_path: Path) -> None:
    path = tmp_path / "night.yaml"
    path.write_bytes("data:\n  source: préférences\n".encode("latin-1"))
    told = refusal(path)
    assert "not UTF-8: byte 0xe9 in line 2" in told
    assert "what to do: save the file as UTF-8" in told


def test_a_problem_in_a_list_names_the_entry(tmp_path: Path) -> None:
    told = refusal(written(tmp_path), "gates.rules=[{metric: reward, min: 0}, {metric: kl_ref, max: big}]")
    assert "gates.rules[1].max: " in told


@pytest.mark.parametrize(("value", "base"), [("1:30", 60), ("1:30.5", 60), ("010", 8), ("-0017", 8)])
def test_numbers_in_other_bases_are_refused(tmp_path: Path, value: str, base: int) -> None:
    assert f"{value}' would be read in base {base}" in refusal(written(tmp_path), f"seed={value}")


@pytest.mark.parametrize("value", ["0", "10", "1_000", "0x10", "0.5", "-0.5", "1e-3"])
def test_other_numbers_are_read(tmp_path: Path, value: str) -> None:
    config = load_config(written(tmp_path), [f"gates.rules=[{{metric: reward, min: {value}}}]"])
    assert config.gates.rules[0].min is not None
