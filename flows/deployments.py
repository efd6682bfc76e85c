"""What `nightjar deploy` puts on a Prefect server, as data: pools, deployments, schedules, limits, reactions.

prefect.yaml describes a chain that asks people (`approval_hours` of 12) for Prefect's own command; a test holds the two
together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flows.automations import Reaction, approval_reaction, reconcile_reaction, rollback_reaction
from flows.handover import DEPLOYMENT
from tasks.home import VARIABLE

CPU, GPU = "cpu", "gpu"
NEW_POOLS: Mapping[str, int | None] = {CPU: None, GPU: 1}
"""Runs at once in a pool of processes for which nobody has said how many; null: any number."""
RECONCILE_CRON = "17 * * * *"
SLOT_GRACE_SECONDS = 600
"""A run that has been pending for this long without starting gives its slot back."""


@dataclass(frozen=True)
class Chain:
    """One chain of nights and how it is to be operated.

    `config`, `home` and `working_dir` (where relative paths of the config start; null: a fresh folder for each run) are
    paths as the workers see them; crons are read in `timezone`; null switches a schedule off.
    `approval_hours`: ask a person about undecided nights, for that long; null: never ask, the champion stays.
    `limits`: the config has some under watch:; without any there is nothing to judge by, and no watch is scheduled.
    `gpu_slots`: stages that the GPU pool runs at once, for all chains; null: as somebody has set it, else one.
    """

    name: str
    model: str
    config: str
    home: str
    overrides: tuple[str, ...] = ()
    working_dir: str | None = None
    cron: str | None = "0 4 * * *"
    watch_cron: str | None = "30 */6 * * *"
    limits: bool = True
    timezone: str = "UTC"
    approval_hours: float | None = None
    notify: tuple[str, ...] = ()
    gpu_pool: bool = True
    gpu_slots: int | None = None
    cpu_job: Mapping[str, str] = field(default_factory=dict)
    gpu_job: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Deployment:
    """One deployment. `entrypoint` is a module path: workers have the project installed. `alone`: only one run at a
    time; a second one is cancelled, or waits its turn."""

    flow: str
    entrypoint: str
    name: str
    description: str
    pool: str
    parameters: Mapping[str, Any]
    cron: str | None = None
    timezone: str = "UTC"
    alone: Literal["cancel", "wait"] | None = None
    job_variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def full_name(self) -> str:
        """As Prefect's command line writes it."""
        return f"{self.flow}/{self.name}"


def pools_of(chain: Chain) -> dict[str, int | None]:
    """Name and wanted limit of each pool; null: as somebody has set it, else that of NEW_POOLS."""
    return {CPU: None} | ({GPU: chain.gpu_slots} if chain.gpu_pool else {})


def deployments_of(chain: Chain) -> list[Deployment]:
    """Every deployment of the chain; all are called like it."""
    light = [_nightly(chain), _watch(chain), _rollback(chain), _approve(chain), _reconcile(chain)]
    return [*light, _train(chain)] if chain.gpu_pool else light


def reactions_of(chain: Chain) -> list[Reaction]:
    """Every automation of the chain."""
    always = [
        rollback_reaction(chain.name, chain.model, chain.notify),
        reconcile_reaction(chain.name, chain.home, chain.notify),
    ]
    if chain.approval_hours is None:
        return always
    return [*always, approval_reaction(chain.name, chain.home, chain.approval_hours, chain.notify)]


def _nightly(chain: Chain) -> Deployment:
    return Deployment(
        flow="nightly",
        entrypoint="flows.nightly.nightly",
        name=chain.name,
        description="A night: validate, train, judge, and promote if it is better and safe.",
        pool=CPU,
        parameters={"request": {"config": chain.config, "overrides": list(chain.overrides)}},
        cron=chain.cron,
        timezone=chain.timezone,
        alone="cancel",
        job_variables=_job(chain, chain.cpu_job, hands_over=True),
    )


def _watch(chain: Chain) -> Deployment:
    return Deployment(
        flow="watch",
        entrypoint="flows.watch.watch",
        name=chain.name,
        description="Measure the champion again, against the limits under watch: in the config.",
        pool=CPU,
        parameters={"request": _request(chain)},
        cron=chain.watch_cron if chain.limits else None,
        timezone=chain.timezone,
        alone="cancel",
        job_variables=_job(chain, chain.cpu_job, hands_over=True),
    )


def _rollback(chain: Chain) -> Deployment:
    return Deployment(
        flow="rollback",
        entrypoint="flows.rollback.rollback",
        name=chain.name,
        description="Put the previous champion back. Run by the breach automation, or by you.",
        pool=CPU,
        parameters={"request": _request(chain) | {"why": "asked for by hand"}},
        job_variables=_job(chain, chain.cpu_job),
    )


def _approve(chain: Chain) -> Deployment:
    hours = {} if chain.approval_hours is None else {"timeout_hours": chain.approval_hours}
    return Deployment(
        flow="approve",
        entrypoint="flows.approve.approve",
        name=chain.name,
        description="Decide about a night that the gate could not judge; without an answer the champion stays.",
        pool=CPU,
        parameters={"request": _request(chain) | hours},
        job_variables=_job(chain, chain.cpu_job),
    )


def _reconcile(chain: Chain) -> Deployment:
    return Deployment(
        flow="reconcile",
        entrypoint="flows.reconcile.reconcile",
        name=chain.name,
        description="Close what dead processes left open, in the registry, MLflow and Prefect. Safe at any time.",
        pool=CPU,
        parameters={"request": _request(chain) | {"deployment": f"nightly/{chain.name}"}},
        cron=RECONCILE_CRON,
        alone="wait",  # one that was asked for by a bad night has something to tell
        job_variables=_job(chain, chain.cpu_job),
    )


def _train(chain: Chain) -> Deployment:
    return Deployment(
        flow="train",
        entrypoint="flows.train.train",
        name=chain.name,
        description="One stage directory on the GPU pool. Nights hand their heavy stages over to it.",
        pool=GPU,
        parameters={},
        job_variables=_job(chain, chain.gpu_job),
    )


def _request(chain: Chain) -> dict[str, Any]:
    """What the small flows are told: a home may hold several chains, so each names its own."""
    return {"home": chain.home, "chain": chain.name, "notify": list(chain.notify)}


def _job(chain: Chain, more: Mapping[str, str], hands_over: bool = False) -> dict[str, Any]:
    env = {VARIABLE: chain.home}
    if hands_over and chain.gpu_pool:
        env[DEPLOYMENT] = f"train/{chain.name}"
    place = {} if chain.working_dir is None else {"working_dir": chain.working_dir}
    return {"env": env, **place, **more}
