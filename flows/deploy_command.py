"""`nightjar deploy`: from a config and a few choices to pools, deployments, schedules and automations on a server."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import typer

from configs.errors import ConfigError, NightjarError
from tasks.notify import require_block_name

if TYPE_CHECKING:
    from flows.deployments import Chain

_OFF = "off"
_FIXED_ZONES = frozenset({"UTC", "Etc/UTC", "GMT", "Etc/GMT", "Z"})


Config = Annotated[Path, typer.Argument(help="The night's YAML.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings laid over the YAML in every night.", show_default=False)
]
Cron = Annotated[str, typer.Option(help="When a night starts; `off` removes the schedule.")]
WatchCron = Annotated[str, typer.Option(help="When the champion is measured, if watch: has limits; `off` removes it.")]
Zone = Annotated[str, typer.Option(help="Zone of both crons, such as Europe/Berlin.")]
Hours = Annotated[
    float, typer.Option(min=0.0, help="Ask a person about undecided nights, for so many hours. 0: never ask.")
]
Blocks = Annotated[
    list[str] | None, typer.Option(help="Notification block, type/name, such as slack-webhook/ops. Repeatable.")
]
GpuPool = Annotated[
    bool, typer.Option("--gpu-pool/--no-gpu-pool", help="Hand heavy stages to the pool gpu, or run them in place.")
]
Slots = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Stages that the GPU pool of all chains runs at once. Default: the limit that it has, else 1.",
    ),
]
ConfigAt = Annotated[
    str | None,
    typer.Option(
        help="Path of the YAML as workers see it. Default: its absolute path here, and runs start in this folder."
    ),
]
CpuJob = Annotated[
    list[str] | None, typer.Option(help="Job variable of the CPU pool's runs, KEY=VALUE (image=...). Repeatable.")
]
GpuJob = Annotated[list[str] | None, typer.Option(help="Job variable of the GPU pool's runs, KEY=VALUE. Repeatable.")]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(name="deploy")(deploy_command)


def deploy_command(
    config: Config,
    overrides: Overrides = None,
    cron: Cron = "0 4 * * *",
    watch_cron: WatchCron = "30 */6 * * *",
    timezone: Zone = "UTC",
    approval_hours: Hours = 0.0,
    notify: Blocks = None,
    gpu_pool: GpuPool = True,
    gpu_slots: Slots = None,
    config_at: ConfigAt = None,
    cpu_job: CpuJob = None,
    gpu_job: GpuJob = None,
) -> None:
    """Put pools, limits, deployments, schedules and automations on the Prefect server of PREFECT_API_URL.

    Idempotent: repeat it after every change of the config or of these choices. What is no longer wanted is removed;
    what somebody has switched off in the browser stays off.
    """
    server_required()
    chain = replace(
        _chain_of(config, overrides or [], config_at),
        cron=cron_or_off("--cron", cron),
        watch_cron=cron_or_off("--watch-cron", watch_cron),
        timezone=known_zone(timezone),
        approval_hours=approval_hours or None,
        notify=tuple(map(require_block_name, notify or ())),  # before anything is sent to the server
        gpu_pool=gpu_pool,
        gpu_slots=gpu_slots,
        cpu_job=_pairs("--cpu-job", cpu_job or []),
        gpu_job=_pairs("--gpu-job", gpu_job or []),
    )
    _deploy(chain)


def _chain_of(config: Path, overrides: Sequence[str], config_at: str | None) -> Chain:
    """What the config says of the chain, with the usual choices. Prefect is imported from here on."""
    from configs.schema import load_config
    from flows.embedded import prepare_prefect
    from tasks.home import home_of

    loaded = load_config(config, overrides)
    home = home_of(loaded)
    prepare_prefect(home)
    from flows.deployments import Chain

    return Chain(
        name=loaded.name,
        model=loaded.registry.model,
        config=config_at or str(config.expanduser().resolve()),
        home=str(home),
        overrides=tuple(overrides),
        limits=bool(loaded.watch.limits),
        working_dir=str(Path.cwd()) if config_at is None else None,
    )


def _deploy(chain: Chain) -> None:
    from flows.deploy import deploy

    for sentence in deploy(chain):
        typer.echo(sentence)
    for remark in remarks(chain):
        typer.echo(f"look: {remark}")


def server_required() -> None:
    """Raises ConfigError without a server: the temporary one would forget everything at once."""
    if not os.environ.get("PREFECT_API_URL"):
        raise ConfigError(
            "there is no Prefect server to deploy to: PREFECT_API_URL is not set",
            "`make stack` starts one on this machine and says its address; docs/operations.md tells of real ones",
        )


def cron_or_off(option: str, text: str) -> str | None:
    """The cron, or None for `off`. Raises ConfigError."""
    if text.strip().lower() == _OFF:
        return None
    from prefect.client.schemas.schedules import CronSchedule
    from pydantic import ValidationError

    try:
        return CronSchedule(cron=text, timezone="UTC").cron
    except ValidationError:
        raise ConfigError(f"{option} {text!r} is no cron", "write five fields, such as '0 4 * * *', or off") from None


def known_zone(name: str) -> str:
    """The zone's name. Raises ConfigError when there is none."""
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError):
        raise ConfigError(f"--timezone {name!r} is not known", "write one such as UTC or Europe/Berlin") from None
    return name


def remarks(chain: Chain) -> list[str]:
    """What works, but somebody should know."""
    return [*_changing_clocks(chain), *_unwatched(chain), *_missing_block(chain.notify)]


def _changing_clocks(chain: Chain) -> Iterator[str]:
    for option, value in (("--cron", chain.cron), ("--watch-cron", chain.watch_cron)):
        if value is not None and chain.timezone not in _FIXED_ZONES and _hours(value) & {1, 2}:
            yield (
                f"{option} {value!r} falls between 01:00 and 03:00 in {chain.timezone}, where clocks are changed: once "
                "a year it is skipped and once it may run twice; choose another hour"
            )


def _unwatched(chain: Chain) -> Iterator[str]:
    if chain.watch_cron is not None and not chain.limits:
        yield (
            f"{chain.config} has no limits under watch:, so nobody measures the champion and nothing rolls it back: "
            "write some, such as `watch: {limits: [{metric: kl_ref, max: 0.4}]}`, and repeat this command; they count "
            "from the next night on. --watch-cron off says that it is meant so"
        )


def _missing_block(blocks: Sequence[str]) -> Iterator[str]:
    if blocks:
        from tasks.notify import check_blocks

        try:
            check_blocks(blocks)
        except NightjarError as error:
            yield str(error)


def _hours(cron: str) -> set[int]:
    """Hours that a cron's second field names: numbers, ranges, every hour, each with a step, in a list."""
    hours: set[int] = set()
    for part in cron.split()[1].split(","):
        match = re.fullmatch(r"(?:\*|(\d+)(?:-(\d+))?)(?:/(\d+))?", part)
        if match:
            first, step = int(match[1] or 0), int(match[3] or 1)
            open_ended = match[1] is None or (match[2] is None and match[3] is not None)
            last = 23 if open_ended else int(match[2] or first)
            hours |= set(range(first, last + 1, step))
    return hours


def _pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key or key == "env":
            raise ConfigError(f"{option} {text!r} is no job variable", "write KEY=VALUE; `env` is set by Nightjar")
        pairs[key] = value
    return pairs
