"""`nightjar validate`: the config and the files it names. No torch, no MLflow, no Prefect."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from configs.credentials import without_credentials
from configs.errors import ConfigError
from configs.schema import NightConfig, load_config
from tasks.model_checks import check_models
from tasks.preflight import PreflightError, reward_functions
from training.errors import DataError


def validate_config(path: Path, overrides: Sequence[str]) -> str:
    """What is right, in words. Raises ConfigError or PreflightError with everything that is wrong."""
    config = load_config(path, overrides)
    problems, data = _problems(config)
    if problems:
        shown = "\n".join(f"- {problem}" for problem in problems)
        raise PreflightError(f"{path}: every key is right, but what it names is not all there:\n{shown}")
    blocking = sum(rule.severity == "block" for rule in config.gates.rules)
    return (
        f"{path} is valid: night chain {config.name!r}, base {config.models.base}, "
        f"{len(config.gates.rules)} gate rules ({blocking} blocking), registry model {config.registry.model!r}, "
        f"config hash {config.config_hash[:12]}\n{data}"
    )


def _problems(config: NightConfig) -> tuple[list[str], str]:
    """Everything that is wrong with what the config names, and what was seen of the data."""
    from training.rewards.functions import check_reward_name

    problems, data = [], ""
    try:
        check_models(config)
    except (PreflightError, ConfigError, ValueError) as error:
        problems.append(str(error))
    try:
        data = _seen(config)
    except DataError as error:
        problems.append(str(error))
    except OSError as error:
        source = without_credentials(config.data.source or "")
        problems.append(f"data.source {source}: cannot be read: {error.strerror or error}; check its permissions")
    for key, name in reward_functions(config).items():
        try:
            check_reward_name(name, config.reward.allowed_functions, key)
        except ConfigError as error:
            problems.append(str(error))
    return problems, data


def _seen(config: NightConfig) -> str:
    """One line on the data. Only files of this machine are opened: nobody knows how long a network takes."""
    generator, source = config.data.quickstart, config.data.source
    if generator is not None:
        return f"data: built-in generator, {generator.partitions} partitions of {generator.pairs_per_night} pairs"
    if source is not None and "://" in source and not source.startswith("file://"):
        return f"data: {without_credentials(source)} is looked at when a night begins"
    from training.data.look import look_at  # brings pyarrow, which other answers do without

    return f"data: {look_at(config.data).sentence}"
