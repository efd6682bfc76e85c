"""Every YAML that is shipped is valid, and says what the write-ups that users come with say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from configs.schema import NightConfig, load_config, preset_names
from training.data.quickstart import deliver

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
PROFILES = sorted(path.name for path in CONFIGS.glob("*.yaml"))
PRESETS = sorted(path.stem for path in (CONFIGS / "presets").glob("*.yaml"))
MINIMAL = "name: x\ndata: {source: d}\nmodels: {base: m}\ngates: {rules: [{metric: reward, min: 0}]}\n"


def with_preset(folder: Path, preset: str) -> NightConfig:
    path = folder / "night.yaml"
    path.write_text(f"preset: {preset}\n{MINIMAL}")
    return load_config(path)


def test_no_yaml_escapes_these_tests() -> None:
    found = {path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.y*ml")}
    assert found == set(PROFILES) | {f"presets/{name}.yaml" for name in PRESETS}
    assert {"quickstart.yaml", "smollm2-135m-hh.yaml", "smollm2-135m-gsm8k.yaml"} <= set(PROFILES)
    assert preset_names() == PRESETS


@pytest.mark.parametrize("name", PROFILES)
def test_profile_is_valid_and_its_chain_is_named_apart(name: str) -> None:
    config = load_config(CONFIGS / name)
    assert config.name in name
    assert config.registry.model != "nightjar-policy", "each profile has a registered model of its own"
    assert config.watch.limits, "a champion without limits is watched by nobody"


def test_the_night_of_the_stack_tests_is_valid() -> None:
    """They run where servers are, which is seldom; its YAML ages with every change of the schema."""
    config = load_config(ROOT / "tests" / "integration" / "short.yaml")
    assert config.name == "short"
    assert config.registry.model == "short-policy"


@pytest.mark.parametrize("name", PROFILES)
def test_hints_in_comments_name_real_keys(name: str) -> None:
    """An override that a comment recommends must work."""
    text = (CONFIGS / name).read_text()
    comments = "\n".join(line for line in text.splitlines() if line.lstrip().startswith("#"))
    overrides = re.findall(r"\b([a-z0-9_]+(?:\.[a-z0-9_]+)+=[^\s]+)", comments)
    config = load_config(CONFIGS / name, overrides)
    assert isinstance(config, NightConfig)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_hold_what_both_write_ups_share(tmp_path: Path, preset: str) -> None:
    config = with_preset(tmp_path, preset)
    ppo, replay = config.ppo, config.replay
    assert (ppo.ppo_mini_batch_size, ppo.ppo_epochs, ppo.clip_ratio) == (64, 4, 0.2)
    assert (ppo.train_batch_size, ppo.actor_lr, ppo.critic_lr) == (256, 1e-6, 1e-5)
    assert (ppo.lam, ppo.clip_ratio_c, ppo.adv_estimator, config.rollout.n) == (0.95, 3.0, "gae", 5)
    assert (ppo.use_dynamic_bsz, ppo.ppo_micro_batch_size, ppo.lora_rank) == (True, 2, 32)
    assert (config.models.max_prompt_length, config.models.max_response_length) == (1024, 2048)
    assert config.models.share_backbone == "auto"
    assert replay.prioritized
    assert replay.importance_mode == "clip_to"
    assert (config.distill.lora_rank, config.distill.lora_target_modules) == (32, "all-linear")
    assert config.guards.perplexity_steps == 500
    rules = {(rule.metric, rule.op, rule.threshold, rule.action) for rule in config.guards.rules}
    assert {
        ("kl_behavior", ">", 0.02, "warn"), ("advantage_variance", "<", 0.1, "warn"),
        ("effective_sample_fraction", "<", 0.8, "warn"), ("perplexity", ">", 1.2, "rollback"),
        ("response_length", ">", 2.0, "rollback"),
    } <= rules  # fmt: skip
    assert ppo.ppo_max_token_len == 3 * (config.models.max_prompt_length + config.models.max_response_length)
    assert (replay.alpha, replay.beta_start, replay.beta_end, replay.refresh_steps) == (0.6, 0.4, 1.0, 100)
    assert (replay.importance_threshold, replay.importance_clip_to) == (1.5, 1.2)
    assert 10_000 <= replay.capacity <= 50_000
    assert config.distill.max_student_teacher_kl == 0.05


def test_where_the_two_presets_differ(tmp_path: Path) -> None:
    stable, efficient = with_preset(tmp_path, "stable"), with_preset(tmp_path, "data_efficient")
    assert (stable.ppo.gamma, efficient.ppo.gamma) == (1.0, 0.99)
    assert (stable.ppo.kl_ctrl.type, stable.ppo.kl_ctrl.target_kl) == ("adaptive", 0.1)
    assert (efficient.ppo.use_kl_loss, efficient.ppo.kl_loss_coef, efficient.ppo.kl_loss_type) == (True, 0.001, "k1+")
    assert (efficient.ppo.kl_penalty, efficient.ppo.use_kl_in_reward) == ("k1", True)
    assert not stable.ppo.use_kl_loss
    assert (stable.replay.capacity, efficient.replay.capacity) == (50_000, 10_000)
    clip = next(rule for rule in efficient.guards.rules if rule.action == "reduce_clip")
    assert clip.then.to == 0.1
    limits = {(rule.metric, rule.threshold, rule.action) for rule in stable.guards.rules}
    assert {("kl_ref", 0.2, "warn"), ("kl_ref", 0.3, "rollback"), ("perplexity", 1.2, "rollback")} <= limits
    softened = next(rule for rule in efficient.guards.rules if rule.metric == "kl_ref" and rule.action == "reduce_lr")
    assert (softened.threshold, softened.then.floor) == (0.05, 1e-6)
    assert softened.then.factor * 1.0 <= 1e-6, "down to the floor at once, whatever rate a night begins with"


def test_quickstart_promises() -> None:
    config = load_config(CONFIGS / "quickstart.yaml")
    assert config.data.quickstart is not None
    assert config.data.quickstart.partitions == 2, "a third `make demo` has no new data"
    gold = next(rule for rule in config.gates.rules if rule.metric == "gold_reward" and rule.severity == "block")
    assert (gold.baseline, gold.min_improvement.absolute) == ("reference", 0), "the lower end must be above zero"


def test_quickstart_questions_fit_its_length_limits(tmp_path: Path) -> None:
    """Counted in words and marks; the tokenizer trained on these texts knows every word of them."""
    import pyarrow.parquet as pq

    config = load_config(CONFIGS / "quickstart.yaml")
    partition = deliver(tmp_path, 0, config.data.quickstart, config.seed)
    assert partition is not None
    table = pq.read_table(next(partition.glob("*.parquet")))
    longest = max(len(re.findall(r"\w+|[^\w\s]", text)) for text in table["chosen"].to_pylist())
    assert longest < config.models.max_response_length


def test_readme_config_is_valid(tmp_path: Path) -> None:
    """The YAML that the README tells people to write."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    nights = [block for block in blocks if "models:" in block]
    assert nights, "the README shows a night's YAML"
    for block in nights:
        assert len(block.splitlines()) <= 20
        path = tmp_path / "my.yaml"
        path.write_text(block)
        assert yaml.safe_load(block)["data"]["source"]
        assert load_config(path).watch.limits, "the README promises that a broken limit rolls back"
