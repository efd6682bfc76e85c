"""`nightjar validate`: the config and the files it names. No torch, no MLflow, no Prefect."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from configs.errors import ConfigError
from configs.schema import NightConfig, load_config
from tasks.preflight import PreflightError, check_models, reward_functions


def validate_config(path: Path, overrides: Sequence[str]) -> str:
    """What is right, in words. Raises ConfigError or PreflightError with everything that is wrong."""
    config = load_config(path, overrides)
    problems = _problems(config)
    if problems:
        shown = "\n".join(f"- {problem}" for problem in problems)
        raise PreflightError(f"{path}: every key is right, but what it names is not all there:\n{shown}")
    blocking = sum(rule.severity == "block" for rule in config.gates.rules)
    return (
        f"{path} is valid: night chain {config.name!r}, base {config.models.base}, "
        f"{len(config.gates.rules)} gate rules ({blocking} blocking), registry model {config.registry.model!r}, "
        f"config hash {config.config_hash[:12]}"
    )


def _problems(config: NightConfig) -> list[str]:
    from training.rewards.functions import check_reward_name

    problems = []
    try:
        check_models(config)
    except (PreflightError, ConfigError, ValueError) as error:
        problems.append(str(error))
    source = config.data.source
    if source is not None and "://" not in source and not Path(source).exists():
        hint = "relative paths start at the working directory"
        problems.append(f"data.source: {source}: no such file or folder\n  what to do: {hint}")
    for key, name in reward_functions(config).items():
        try:
            check_reward_name(name, config.reward.allowed_functions, key)
        except ConfigError as error:
            problems.append(str(error))
    return problems
