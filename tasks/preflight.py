"""What is checked before a night computes anything: models, reward function, device, disk and write access.

Torch-free and quick. Every problem is found before the first is told, so that nobody mends them one night at a time.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from configs.errors import NightjarError
from configs.schema import NightConfig
from tasks.mlflow_client import missing_database
from tasks.model_checks import check_models
from tasks.registry_errors import TrackingUnavailable

_GIGABYTE = 1024**3
_FIRST_TABLES_SECONDS = 180.0


class PreflightError(NightjarError):
    """The night cannot begin; nothing has run. The message lists every problem with its way out."""


def check_before(config: NightConfig, home: Path, *more: Callable[[], object]) -> None:
    """Run every check, and `more` (the source, MLflow). Raises PreflightError listing all problems."""
    checks = [
        lambda: check_models(config),
        lambda: check_reward_function(config),
        lambda: check_home(home, config.runtime.min_free_disk_gb),
        *more,
    ]
    problems = [str(error) for error in _problems(checks)]
    if len(problems) == 1:
        raise PreflightError(f"{problems[0]}\nThe night has not begun; nothing was computed.")
    if problems:
        shown = "\n".join(f"- {problem}" for problem in problems)
        raise PreflightError(f"{len(problems)} problems; the night has not begun, nothing was computed:\n{shown}")


def check_reward_function(config: NightConfig) -> None:
    """The functions that the config names exist and may be used. Raises a NightjarError naming the key."""
    from training.rewards.functions import check_reward_name, resolve_reward_function

    for key, name in reward_functions(config).items():
        check_reward_name(name, config.reward.allowed_functions, key)
        resolve_reward_function(name, config.reward.allowed_functions)


def reward_functions(config: NightConfig) -> dict[str, str]:
    """Config key to the name of the function that stands there."""
    named = {
        "reward.function": config.reward.function if config.reward.kind == "function" else None,
        "evaluation.gold_function": config.evaluation.gold_function,
    }
    return {key: name for key, name in named.items() if name is not None}


def check_tracking(uri: str, timeout_seconds: float) -> None:
    """MLflow answers. Raises TrackingUnavailable. A database file gets the time that making its tables takes."""
    from tasks.reachability import require_tracking

    if uri.startswith("sqlite:"):
        import mlflow.store.tracking.sqlalchemy_store  # noqa: F401  (seconds of import are no silence)

        timeout_seconds = max(timeout_seconds, _FIRST_TABLES_SECONDS)
    require_tracking(uri, timeout_seconds)


def check_existing_tracking(uri: str, timeout_seconds: float) -> None:
    """MLflow answers, and was there before it was asked. Raises TrackingUnavailable; makes no database."""
    require_database(uri)
    check_tracking(uri, timeout_seconds)


def require_database(uri: str) -> None:
    """A store that is a file is there: asking MLflow would make an empty one. Raises TrackingUnavailable."""
    file = missing_database(uri)
    if file is not None:
        raise TrackingUnavailable(
            f"MLflow's database {file} is missing or empty",
            "restore it from a backup; if there is none, `nightjar reconcile --adopt --why TEXT` begins an empty one",
        )


def check_home(home: Path, min_free_gb: float) -> None:
    """The home can be written, and its disk has room. Raises PreflightError."""
    probe = home / f".probe-{uuid.uuid4().hex}"
    try:
        home.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"nightjar")
        probe.unlink()
    except OSError as error:
        raise PreflightError(
            f"home {home} cannot be written: {error.strerror or error}",
            "set NIGHTJAR_HOME or runtime.home to a folder that can",
        ) from None
    free = free_gigabytes(home)
    if free < min_free_gb:
        raise PreflightError(
            f"home {home}: {free:.1f} GB free, and runtime.min_free_disk_gb asks for {min_free_gb:g}",
            "make room, set NIGHTJAR_HOME to another disk, or lower the limit",
        )


def free_gigabytes(folder: Path) -> float:
    """Free space of the disk that holds `folder` (or its nearest existing parent), in GiB."""
    return shutil.disk_usage(nearest_folder(folder)).free / _GIGABYTE


def nearest_folder(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    while not folder.exists():
        folder = folder.parent
    return folder


def _problems(checks: list[Callable[[], object]]) -> Iterator[NightjarError]:
    for check in checks:
        try:
            check()
        except NightjarError as error:
            yield error
        except OSError as error:
            what = error.filename or "a file that the night needs"
            yield PreflightError(
                f"{what} cannot be read: {error.strerror or error}", "check the path, its permissions and its disk"
            )
