"""`nightjar deploy` on a real Prefect server: done twice nothing is doubled, what is no longer wanted is gone."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from prefect import get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.objects import ConcurrencyLimitStrategy

from flows.automations import automation_of, rollback_is_automatic
from flows.deploy import deploy
from flows.deployments import Chain, deployments_of, reactions_of

CHAIN = Chain(name="team", model="team policy", config="/etc/night.yaml", home="/srv/nightjar", approval_hours=6)
FULL_NAMES = sorted(f"{flow}/team" for flow in ("nightly", "watch", "rollback", "approve", "reconcile", "train"))


@pytest.fixture
def client():
    with get_client(sync_client=True) as connected:
        yield connected


@pytest.fixture(autouse=True)
def clean(client):
    yield
    for deployment in client.read_deployments():
        client.delete_deployment(deployment.id)
    for automation in client.read_automations():
        client.delete_automation(automation.id)


def standing(client) -> dict[str, object]:
    """Everything that `deploy` makes, by identity."""
    flows = {flow.id: flow.name for flow in client.read_flows()}
    found = client.read_deployments()
    return {
        "deployments": {f"{flows[one.flow_id]}/{one.name}": one.id for one in found},
        "schedules": sorted((s.schedule.cron, s.schedule.timezone, s.active) for one in found for s in one.schedules),
        "automations": sorted((one.name, one.id) for one in client.read_automations()),
        "pools": sorted((pool.name, pool.id, pool.concurrency_limit) for pool in client.read_work_pools()),
    }


def test_twice_is_once(client) -> None:
    deploy(CHAIN)
    first = standing(client)
    assert sorted(first["deployments"]) == FULL_NAMES
    assert first["schedules"] == [
        ("0 4 * * *", "UTC", True), ("17 * * * *", "UTC", True), ("30 */6 * * *", "UTC", True),
    ]  # fmt: skip
    assert len(first["automations"]) == 3
    assert [(name, limit) for name, _, limit in first["pools"]] == [("cpu", None), ("gpu", 1)]
    deploy(CHAIN)
    assert standing(client) == first


def test_one_night_at_a_time_and_a_second_is_cancelled(client) -> None:
    deploy(CHAIN)
    cancel, wait = ConcurrencyLimitStrategy.CANCEL_NEW, ConcurrencyLimitStrategy.ENQUEUE
    for flow, strategy in (("nightly", cancel), ("watch", cancel), ("reconcile", wait), ("rollback", None)):
        found = client.read_deployment_by_name(f"{flow}/team")
        limit = found.global_concurrency_limit
        assert (limit is not None and limit.limit == 1) is (strategy is not None), flow
        if strategy is not None:
            assert found.concurrency_options.collision_strategy == strategy


def test_a_schedule_that_is_no_longer_wanted_is_gone(client) -> None:
    deploy(CHAIN)
    deploy(replace(CHAIN, cron=None, watch_cron="5 5 * * *", timezone="Europe/Berlin"))
    assert client.read_deployment_by_name("nightly/team").schedules == []
    (watching,) = client.read_deployment_by_name("watch/team").schedules
    assert (watching.schedule.cron, watching.schedule.timezone) == ("5 5 * * *", "Europe/Berlin")


def test_what_somebody_switched_off_stays_off(client) -> None:
    deploy(CHAIN)
    nightly = client.read_deployment_by_name("nightly/team")
    client._client.patch(f"/deployments/{nightly.id}/schedules/{nightly.schedules[0].id}", json={"active": False})
    rollback = client.read_automations_by_name("nightjar team: breach rolls back")[0]
    client.pause_automation(rollback.id)
    assert not rollback_is_automatic("team", CHAIN.model)
    told = deploy(CHAIN)
    assert any("switched OFF" in sentence for sentence in told)
    assert [s.active for s in client.read_deployment_by_name("nightly/team").schedules] == [False]
    assert not client.read_automation(rollback.id).enabled


def test_automations_that_are_doubled_or_no_longer_wanted_are_removed_and_others_left_alone(client) -> None:
    deploy(CHAIN)
    ids = {name: client.read_deployment_by_name(name).id for name in FULL_NAMES}
    reaction = reactions_of(CHAIN)[0]
    client.create_automation(automation_of(reaction, ids))
    foreign = automation_of(replace(reaction, name="nightjar team-b: breach rolls back"), ids)
    client.create_automation(foreign)
    assert len(client.read_automations_by_name(reaction.name)) == 2
    deploy(replace(CHAIN, approval_hours=None))
    names = sorted(one.name for one in client.read_automations())
    assert names == sorted([
        "nightjar team: breach rolls back", "nightjar team: bad night is reconciled", foreign.name,
    ])  # fmt: skip


def test_a_changed_reaction_is_changed_on_the_server(client) -> None:
    deploy(CHAIN)
    deploy(replace(CHAIN, notify=("slack-webhook/ops",)))
    for automation in client.read_automations():
        assert automation.actions[0].parameters["request"]["notify"] == ["slack-webhook/ops"], automation.name
    (rollback,) = client.read_automations_by_name("nightjar team: breach rolls back")
    assert rollback.trigger.expect == {"nightjar.champion.breached"}
    assert rollback.trigger.match.model_dump() == {"prefect.resource.id": "nightjar.model.team policy"}
    assert rollback.actions[0].deployment_id == client.read_deployment_by_name("rollback/team").id
    assert rollback_is_automatic("team", CHAIN.model)
    assert not rollback_is_automatic("team", "renamed since the last deploy"), "nobody would hear it"
    assert not rollback_is_automatic("somebody-else", CHAIN.model)


def test_without_a_gpu_pool_nights_keep_their_stages(client) -> None:
    deploy(CHAIN)
    nightly = client.read_deployment_by_name("nightly/team")
    assert nightly.job_variables["env"]["NIGHTJAR_TRAIN_DEPLOYMENT"] == "train/team"
    assert client.read_deployment_by_name("train/team").work_pool_name == "gpu"
    told = deploy(replace(CHAIN, gpu_pool=False, gpu_slots=4))
    assert "deployment train/team was removed" in told
    nightly = client.read_deployment_by_name("nightly/team")
    assert nightly.job_variables["env"] == {"NIGHTJAR_HOME": "/srv/nightjar"}


def test_the_limit_of_the_gpu_pool_follows(client) -> None:
    deploy(CHAIN)
    deploy(replace(CHAIN, gpu_slots=3))
    assert client.read_work_pool("gpu").concurrency_limit == 3
    deploy(replace(CHAIN, name="another"))
    assert client.read_work_pool("gpu").concurrency_limit == 3, "a chain that asks for nothing changes nothing"


def test_a_gpu_pool_that_its_worker_made_gets_a_limit_and_one_that_somebody_set_stays(client) -> None:
    """The documented order: workers start first, make their pools, and set no limit."""
    for pool in client.read_work_pools():
        client.delete_work_pool(pool.name)
    for name in ("cpu", "gpu"):
        client.create_work_pool(WorkPoolCreate(name=name, type="process"))
    assert "work pool gpu now has 1 run(s) at once" in deploy(CHAIN)
    assert [client.read_work_pool(name).concurrency_limit for name in ("cpu", "gpu")] == [None, 1]
    client.update_work_pool("gpu", WorkPoolUpdate(concurrency_limit=2))
    assert "work pool gpu (process) is there" in deploy(CHAIN)
    assert client.read_work_pool("gpu").concurrency_limit == 2


def test_a_gpu_pool_of_another_kind_is_left_as_it_is(client) -> None:
    client.delete_work_pool("gpu")
    client.create_work_pool(WorkPoolCreate(name="gpu", type="kubernetes"))
    deploy(CHAIN)
    assert client.read_work_pool("gpu").concurrency_limit is None
    client.delete_work_pool("gpu")


@pytest.mark.parametrize("deployment", deployments_of(CHAIN), ids=lambda one: one.flow)
def test_every_field_of_every_form_says_what_it_is(client, deployment) -> None:
    deploy(CHAIN)
    schema = client.read_deployment_by_name(deployment.full_name).parameter_openapi_schema
    assert list(schema["properties"]) == ["request"]
    form = schema["definitions"][schema["properties"]["request"]["$ref"].rpartition("/")[2]]
    assert form["description"]
    assert form["additionalProperties"] is False
    for name, field in form["properties"].items():
        assert len(field.get("description", "")) > 10, f"{deployment.flow}: {name} has no description"
        assert field.get("title"), f"{deployment.flow}: {name} has no title"
        assert "$ref" in json.dumps(field) or "type" in json.dumps(field), name


@pytest.mark.parametrize(
    "parameters",
    [{"request": {"home": "/h", "why": "x", "reason": "typo"}}, {"request": {"home": "/h", "why": ""}}],
    ids=["unknown-key", "no-reason"],
)
def test_the_server_refuses_a_wrong_form(client, parameters) -> None:
    from prefect.exceptions import PrefectHTTPStatusError

    deploy(CHAIN)
    rollback = client.read_deployment_by_name("rollback/team")
    with pytest.raises(PrefectHTTPStatusError, match=r"409|422"):
        client.create_flow_run_from_deployment(rollback.id, parameters=parameters)
