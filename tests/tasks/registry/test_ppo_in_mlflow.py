"""What a real PPO stage measures at every step arrives in MLflow, name by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.schema import NightConfig
from configs.schema.supervised import RewardConfig
from tasks.delivery import deliver_metrics
from tasks.launch import StageRun
from tasks.night_tracking import NightTracker
from tasks.site import Site
from training.contract import StageResult

EVERY_STEP = {
    "KL variants": ["kl_ref_offpolicy", "kl_behavior", "approx_kl", "reward_kl"],
    "reward mean": ["reward_mean", "reward_raw_mean"],
    "policy and value loss": ["policy_loss", "value_loss", "actor_loss", "loss"],
    "clip fractions": ["clip_frac", "clip_frac_lower", "value_clip_frac", "reward_clip_frac"],
    "entropy": ["entropy"],
    "ratio": ["ratio_mean"],
    "effective sample size": ["effective_sample_fraction", "importance_weight_mean"],
    "advantage variance": ["advantage_variance"],
    "explained variance": ["explained_variance"],
    "lengths": ["response_length/mean", "response_length/max"],
    "gradient norms": ["grad_norm", "critic_grad_norm"],
    "learning rates": ["learning_rate", "critic_learning_rate"],
    "KL coefficient": ["kl_coef"],
    "tokens a second": ["tokens_per_second"],
}
NOW_AND_THEN = ["kl_ref", "kl_ref_sequence", "heldout_reward", "response_length", "eos_rate", "perplexity"]
ACTOR = {
    "approx_kl", "policy_loss", "actor_loss", "clip_frac", "clip_frac_lower", "entropy", "ratio_mean",
    "kl_ref_offpolicy", "grad_norm", "learning_rate",
}  # fmt: skip
"""Not measured while the critic warms up alone."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StageResult]:
    """A tiny PPO on a rule's reward, run to its end: its directory and its result."""
    from tests.training.stages import arithmetic_rows, run_here, write_snapshot, write_stage

    home = tmp_path_factory.mktemp("night")
    snapshot = write_snapshot(home / "snapshot", arithmetic_rows())
    base = run_here(write_stage(home / "base", "base", {"snapshot": snapshot}), "base").output("model")
    inputs = {"snapshot": snapshot, "reference": Path(base.path)}
    rule = {"reward": RewardConfig(kind="function", function="quickstart")}
    store = {"store": str(home / "store"), "night_index": 0}
    view = run_here(write_stage(home / "annotate", "annotate", inputs, store, **rule), "annotate").output("view")
    directory = write_stage(home / "ppo", "ppo", inputs | {"view": Path(view.path)}, store, **rule)
    return directory, run_here(directory, "ppo")


def test_every_metric_of_every_step_arrives(site: Site, trained: tuple[Path, StageResult]) -> None:
    from configs.schema.metric_names import STEP_METRICS

    directory, result = trained
    config = NightConfig.model_validate(
        {"data": {"source": "d"}, "models": {"base": "b"}, "gates": {"rules": [{"metric": "reward", "min": 0.0}]}}
    )
    tracker = NightTracker.open(site, "n-0001", config)
    tracker.stage_done("ppo", StageRun(result, directory, reused=False, attempts=1, seconds=1.0))
    assert tracker.late == []
    client, run = site.registry.client, tracker.run.stage_run("ppo")

    def steps(name: str) -> set[int]:
        return {metric.step for metric in client.get_metric_history(run, name)}

    whole = set(range(1, int(result.metrics["steps"]) + 1))
    warm_up = whole - steps("policy_loss")
    assert len(whole) > len(warm_up) > 0
    for group, names in EVERY_STEP.items():
        for name in names:
            assert steps(name) >= whole - (warm_up if name in ACTOR else set()), f"{group}: {name}"
    for name in NOW_AND_THEN:
        assert len(steps(name)) > 2, name
        assert 0 in steps(name), f"{name} has a baseline"
    missing = [name for name in STEP_METRICS if not steps(name)]
    assert missing == [], "what guards may be written on is shown as well"
    data = client.get_run(run).data
    assert data.metrics["final/peak_memory_mb"] == pytest.approx(result.facts["peak_memory_mb"])
    assert data.metrics["final/wall_seconds"] == pytest.approx(result.wall_seconds)
    assert not [tag for tag in data.tags if tag.startswith("nonfinite")]
    assert deliver_metrics(directory, tracker.run.destination("ppo"), final=True).points == 0


def test_lengths_are_those_of_the_minibatch(trained: tuple[Path, StageResult]) -> None:
    from tests.training.stages import MODELS
    from training.contract import METRICS
    from training.recorder import metric_series

    means, longest = (metric_series(trained[0] / METRICS, f"response_length/{kind}")[1] for kind in ("mean", "max"))
    assert len(means) == len(longest) > 0
    assert all(0 < mean <= most <= MODELS.max_response_length for mean, most in zip(means, longest, strict=True))
    assert all(most == int(most) for most in longest)
    assert len(set(means)) > 1
