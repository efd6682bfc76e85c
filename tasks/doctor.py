"""Is everything here that a night needs? Each check answers in a sentence, and says what to do where it is not."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from configs.credentials import without_credentials, without_passwords
from configs.errors import NightjarError
from configs.schema import NightConfig
from tasks.launch_plan import available_cores
from tasks.mlflow_client import missing_database, tracking_uri_of
from tasks.model_checks import check_models
from tasks.night_state import NightBook
from tasks.prefect_chain import missing_for
from tasks.prefect_health import check_prefect
from tasks.preflight import (
    check_home,
    check_reward_function,
    check_tracking,
    free_gigabytes,
    nearest_folder,
    require_database,
)
from tasks.server_clocks import clocks_apart

Health = Literal["good", "look", "bad"]
PACKAGES = ("torch", "transformers", "peft", "prefect", "mlflow", "great-expectations", "pyarrow")
DEEPSPEED = "deepspeed"
"""Needed where runtime.strategy names it, and there alone; it has no build for every system."""


@dataclass(frozen=True)
class Finding:
    """One check: good, look (works, but somebody should know) or bad (a night will not run)."""

    about: str
    health: Health
    sentence: str


def examine(home: Path, config: NightConfig | None) -> list[Finding]:
    """All checks, cheapest first. Never raises."""
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("python", _python),
        ("packages", lambda: _packages(config)),
        ("cores", _cores),
        ("gpu", _gpus),
        ("home", lambda: _home(home, config)),
        ("clock", lambda: _clock(home, config)),
        ("mlflow", lambda: _mlflow(home, config)),
        ("prefect", lambda: _prefect(config)),
    ]
    if config is not None:
        checks += [
            ("data", lambda: _data(config)),
            ("models", lambda: _refusal("models", "every model folder is complete", lambda: check_models(config))),
            ("reward", lambda: _refusal("reward", "reward functions are there", lambda: check_reward_function(config))),
        ]
    return [_careful(about, check) for about, check in checks]


def _careful(about: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # a check that breaks is itself a finding
        return Finding(about, "bad", without_passwords(f"could not be checked: {type(error).__name__}: {error}"))


def _refusal(about: str, good: str, check: Callable[[], object]) -> Finding:
    try:
        check()
    except NightjarError as error:
        return Finding(about, "bad", str(error))
    return Finding(about, "good", good)


def _python() -> Finding:
    fits = sys.version_info >= (3, 11)
    told = f"Python {platform.python_version()}"
    return Finding("python", "good" if fits else "bad", told if fits else f"{told}: Nightjar needs 3.11 or newer")


def _packages(config: NightConfig | None) -> Finding:
    versions = dict(_versions())
    needed = [*PACKAGES, DEEPSPEED] if config is not None and config.runtime.strategy == DEEPSPEED else PACKAGES
    missing = [name for name in needed if name not in versions]
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    if missing:
        return Finding("packages", "bad", f"missing: {', '.join(missing)}; run `make install`. There is {told}")
    return Finding("packages", "good", told)


def _versions() -> Iterator[tuple[str, str]]:
    for name in (*PACKAGES, DEEPSPEED):
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue


def _cores() -> Finding:
    return Finding("cores", "good", f"{available_cores()} CPU cores for this process")


def _gpus() -> Finding:
    command = shutil.which("nvidia-smi")
    if command is None:
        return Finding("gpu", "look", "no GPU here: stages run on the CPU, which suits small models only")
    query = [command, "--query-gpu=name,memory.free", "--format=csv,noheader"]
    listed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    if listed.returncode != 0:
        return Finding("gpu", "bad", f"nvidia-smi fails: {listed.stderr.strip() or listed.stdout.strip()}")
    return Finding("gpu", "good", "; ".join(listed.stdout.strip().splitlines()))


def _home(home: Path, config: NightConfig | None) -> Finding:
    least = config.runtime.min_free_disk_gb if config is not None else 1.0
    good = f"{home}: writable, {free_gigabytes(home):.0f} GB free"
    return _refusal("home", good, lambda: check_home(nearest_folder(home), least))


def _data(config: NightConfig) -> Finding:
    from training.data.look import look_at  # brings pyarrow

    if config.data.source is None:
        return Finding("data", "good", "made by the built-in generator, night by night")
    try:
        seen = look_at(config.data)
    except NightjarError as error:
        return Finding("data", "bad", str(error))
    return Finding("data", "look" if seen.bad else "good", seen.sentence)


def _clock(home: Path, config: NightConfig | None) -> Finding:
    zone = "/".join(time.tzname)
    if time.time() < 1_700_000_000:
        return Finding("clock", "bad", "the clock is years slow; set it, or schedules and leases go wrong")
    if apart := clocks_apart(_servers(home, config)):
        words = "set both by NTP: schedules, signs of life and stale nights are judged by both"
        return Finding("clock", "look", f"{'; '.join(apart)}; {words}")
    return Finding("clock", "good", f"{time.strftime('%Y-%m-%d %H:%M:%S')} {zone}; schedules name their own time zone")


def _servers(home: Path, config: NightConfig | None) -> Iterator[tuple[str, str]]:
    tracking = tracking_uri_of(home, config.registry.tracking_uri if config is not None else None)
    if tracking.startswith("http"):
        yield "MLflow", f"{tracking.rstrip('/')}/health"
    if url := os.environ.get("PREFECT_API_URL"):
        yield "Prefect", f"{url.rstrip('/')}/health"


def _mlflow(home: Path, config: NightConfig | None) -> Finding:
    uri = tracking_uri_of(home, config.registry.tracking_uri if config is not None else None)
    if (file := missing_database(uri)) is not None:
        if NightBook(home).names():
            return _refusal("mlflow", "", lambda: require_database(uri))
        return Finding("mlflow", "good", f"no {file} yet: the first night makes it")
    timeout = config.registry.reach_timeout_seconds if config is not None else 15.0
    return _refusal("mlflow", f"{without_credentials(uri)} answers", lambda: check_tracking(uri, timeout))


def _prefect(config: NightConfig | None) -> Finding:
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        return Finding("prefect", "good", "no PREFECT_API_URL: each night brings a temporary server of its own")
    try:
        told = check_prefect(url)
    except NightjarError as refusal:
        return Finding("prefect", "bad", str(refusal))
    missing = missing_for(url, config.name) if config is not None else []
    return Finding("prefect", "look" if missing else "good", "; ".join([told, *missing]))
