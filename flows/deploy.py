"""Bringing a Prefect server to what `deployments.py` describes. Done twice it doubles nothing; what went is removed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from uuid import UUID

import httpx
from prefect import Flow, get_client
from prefect.automations import AutomationCore
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions, WorkPool
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.utilities.callables import parameter_schema
from prefect.workers.process import ProcessWorker

from configs.errors import NightjarError
from flows.automations import automation_of
from flows.deployments import NEW_POOLS, SLOT_GRACE_SECONDS, Chain, Deployment, deployments_of, pools_of, reactions_of
from tasks.stages import code_version

if TYPE_CHECKING:
    from prefect.client.schemas.responses import DeploymentResponse

_TAG = "nightjar"
_PROCESS = "process"


def deploy(chain: Chain) -> list[str]:
    """Create or update everything of the chain on the server that this process talks to; one sentence a thing.

    Raises NightjarError when the server does not answer or refuses.
    """
    told = []
    with _in_words(), get_client(sync_client=True) as client:
        for name, limit in pools_of(chain).items():
            told.append(_put_pool(client, name, limit))
        ids: dict[str, UUID] = {}
        for deployment in deployments_of(chain):
            ids[deployment.full_name], sentence = _put_deployment(client, deployment)
            told.append(sentence)
        told += _remove_deployments(client, chain, set(ids))
        told += _put_automations(client, chain, ids)
    return told


def _put_pool(client: SyncPrefectClient, name: str, wanted: int | None) -> str:
    """`wanted` null: a limit that somebody has set, perhaps for another chain, stays; where there is none, ours."""
    try:
        found = client.read_work_pool(name)
    except ObjectNotFound:
        limit = wanted or NEW_POOLS[name]
        template = ProcessWorker.get_default_base_job_template()
        client.create_work_pool(
            WorkPoolCreate(name=name, type=_PROCESS, base_job_template=template, concurrency_limit=limit)
        )
        return f"work pool {name} was created (process workers{_slots(limit)})"
    limit = wanted or _limit_of(found)
    if limit is not None and found.concurrency_limit != limit:
        client.update_work_pool(name, WorkPoolUpdate(concurrency_limit=limit))
        return f"work pool {name} now has{_slots(limit).removeprefix(',')}"
    return f"work pool {name} ({found.type}) is there"


def _limit_of(pool: WorkPool) -> int | None:
    """The pool's own limit, or ours: a worker that started before `deploy` made the pool, and workers set none.

    A pool of another kind was made by a person, for machines that know their own limits.
    """
    if pool.concurrency_limit is not None or pool.type != _PROCESS:
        return pool.concurrency_limit
    return NEW_POOLS[pool.name]


def _slots(limit: int | None) -> str:
    return "" if limit is None else f", {limit} run(s) at once"


def _put_deployment(client: SyncPrefectClient, deployment: Deployment) -> tuple[UUID, str]:
    flow = _flow(deployment)
    existing = _existing(client, deployment.full_name)
    number = client.create_deployment(
        flow_id=client.create_flow_from_name(flow.name),
        name=deployment.name,
        version=code_version("flows"),
        description=deployment.description,
        entrypoint=deployment.entrypoint,
        work_pool_name=deployment.pool,
        parameters=dict(deployment.parameters),
        parameter_openapi_schema=parameter_schema(flow).model_dump(exclude_unset=True),
        enforce_parameter_schema=True,
        job_variables=dict(deployment.job_variables),
        tags=[_TAG],
        pull_steps=[],
        # The server replaces all schedules by these: one that is no longer wanted is really gone.
        schedules=_schedules(deployment, existing),
        concurrency_limit=1 if deployment.alone else None,
        concurrency_options=_collision(deployment),
    )
    when = f"cron {deployment.cron} {deployment.timezone}" if deployment.cron else "no schedule"
    how = "was created" if existing is None else _difference(deployment, existing)
    return number, f"deployment {deployment.full_name} {how}: pool {deployment.pool}, {when}"


def _difference(deployment: Deployment, existing: DeploymentResponse) -> str:
    """What a person would want to know: a schedule that was another one until now."""
    crons = [old.schedule for old in existing.schedules if isinstance(old.schedule, CronSchedule)]
    before = [f"{cron.cron} {cron.timezone}" for cron in crons]
    wanted = [f"{deployment.cron} {deployment.timezone}"] if deployment.cron else []
    return "is up to date" if before == wanted else f"was changed (before: {', '.join(before) or 'no schedule'})"


def _flow(deployment: Deployment) -> Flow[..., Any]:
    module, _, name = deployment.entrypoint.rpartition(".")
    flow: Flow[..., Any] = getattr(importlib.import_module(module), name)
    return flow


def _existing(client: SyncPrefectClient, full_name: str) -> DeploymentResponse | None:
    try:
        return client.read_deployment_by_name(full_name)
    except ObjectNotFound:
        return None


def _schedules(deployment: Deployment, existing: DeploymentResponse | None) -> list[DeploymentScheduleCreate]:
    if deployment.cron is None:
        return []
    schedule = CronSchedule(cron=deployment.cron, timezone=deployment.timezone)
    # A schedule that somebody has switched off in the browser stays off.
    was_active = [old.active for old in existing.schedules] if existing is not None else []
    active = all(was_active) if was_active else True
    return [DeploymentScheduleCreate(schedule=schedule, active=active, slug=deployment.flow)]


def _collision(deployment: Deployment) -> ConcurrencyOptions | None:
    if deployment.alone is None:
        return None
    cancel, wait = ConcurrencyLimitStrategy.CANCEL_NEW, ConcurrencyLimitStrategy.ENQUEUE
    return ConcurrencyOptions(
        collision_strategy=cancel if deployment.alone == "cancel" else wait, grace_period_seconds=SLOT_GRACE_SECONDS
    )


def _remove_deployments(client: SyncPrefectClient, chain: Chain, wanted: set[str]) -> Iterator[str]:
    """Those of an earlier `deploy` of this chain that are no longer described: train, when the GPU pool went."""
    for gone in {f"train/{chain.name}"} - wanted:
        found = _existing(client, gone)
        if found is not None:
            client.delete_deployment(found.id)
            yield f"deployment {gone} was removed"


def _put_automations(client: SyncPrefectClient, chain: Chain, ids: dict[str, UUID]) -> Iterator[str]:
    wanted = {reaction.name: automation_of(reaction, ids) for reaction in reactions_of(chain)}
    prefix = f"nightjar {chain.name}: "
    there = [found for found in _all_automations(client) if found.name.startswith(prefix)]
    for found in there:
        automation = wanted.pop(found.name, None)
        if automation is None:  # no longer wanted, or a double of one that was seen already
            client.delete_automation(found.id)
            yield f"automation {found.name!r} was removed"
            continue
        client.update_automation(found.id, _update(automation, found.enabled))
        yield f"automation {found.name!r} is up to date" + ("" if found.enabled else ", and switched OFF")
    for name, automation in wanted.items():
        client.create_automation(automation)
        yield f"automation {name!r} was created"


def _update(automation: AutomationCore, enabled: bool) -> AutomationCore:
    """The automation with every field set, since the client sends only those; its owner cannot be changed.

    One that somebody has switched off in the browser stays off.
    """
    content = automation.model_dump(mode="json", exclude={"owner_resource"})
    return AutomationCore.model_validate(content | {"enabled": enabled})


def _all_automations(client: SyncPrefectClient) -> Iterator[Any]:
    """Every automation, page by page."""
    offset = 0
    while page := client.read_automations(limit=100, offset=offset):
        yield from page
        offset += len(page)


@contextmanager
def _in_words() -> Iterator[None]:
    try:
        yield
    except httpx.TransportError as error:
        raise NightjarError(
            f"the Prefect server does not answer ({type(error).__name__})", "start it, or correct PREFECT_API_URL"
        ) from error
    except PrefectHTTPStatusError as error:
        said = error.response.text[:500]
        raise NightjarError(f"the Prefect server refuses: {error.response.status_code} {said}") from error
