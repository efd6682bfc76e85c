"""What refuses a night or a measurement before any compute; asked by commands before Prefect is there, and by flows."""

from __future__ import annotations

from pathlib import Path

from configs.schema import NightConfig
from configs.schema.gates import GatesConfig
from tasks.agreement import require_agreement, require_kept_database, require_named_champion
from tasks.append_log import AppendLog
from tasks.champion import no_champion
from tasks.last_config import last_config
from tasks.moved_home import check_home_in_place
from tasks.night_source import check_source
from tasks.preflight import check_before, check_existing_tracking, check_tracking
from tasks.registry import CHAMPION
from tasks.site import Site
from tasks.watching import WATCH_LOG, require_limits
from training.errors import ConfigError


def admit_night(config: NightConfig, home: Path, forced: bool = False) -> Site:
    """The night's registry, when models, source, home, MLflow, journal and gate are as a night needs them.

    `forced`: a person promotes whatever the gate says. Raises PreflightError telling every problem. Done twice it costs
    little.
    """
    site = Site.open(home, config.registry)

    def check_place() -> None:
        check_registry(site)
        if not forced:
            check_first_gate(site, config.gates)

    check_before(config, home, lambda: check_source(config), check_place)
    return site


def check_registry(site: Site) -> None:
    """MLflow answers, its artifacts are in reach, and it tells what the journal tells. Raises a NightjarError."""
    require_kept_database(site)
    check_tracking(site.tracking_uri, site.config.reach_timeout_seconds)
    check_home_in_place(site)
    require_agreement(site)
    require_named_champion(site)


def check_first_gate(site: Site, gates: GatesConfig) -> None:
    """With no champion to compare with, some blocking rule must hold all the same. Raises ConfigError."""
    if not gates.hold_without_champion and site.registry.alias(CHAMPION) is None:
        raise ConfigError(
            f"gates.rules: every blocking rule compares with the champion, and {site.model} has no champion yet: all "
            "would be skipped, and the first version could not be promoted",
            "add a blocking rule that holds without one: a band (min or max), or a comparison with the policy before "
            "PPO, e.g. {metric: reward, direction: higher, baseline: reference, min_improvement: 0}",
        )


def admit_watch(home: Path, chain: str | None, model: str | None) -> tuple[Site, NightConfig]:
    """Registry and config of the champion that is measured.

    Raises NoNightYet and NoChampionYet when there is nothing to measure yet, NightjarError when it cannot be done.
    """
    config = last_config(home, chain, model)
    site = Site.open(home, config.registry)
    require_limits(config.watch)
    AppendLog(home / WATCH_LOG).read()
    check_existing_tracking(site.tracking_uri, site.config.reach_timeout_seconds)
    require_named_champion(site)
    if site.registry.alias(CHAMPION) is None:
        raise no_champion(site)
    return site, config
