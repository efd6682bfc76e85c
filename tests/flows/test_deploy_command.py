"""`nightjar deploy` as a command, and prefect.yaml, which describes the same to Prefect's own command."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import typer
import yaml
from prefect import Flow
from typer.testing import CliRunner

from configs.errors import ConfigError
from flows import deploy as deploy_module
from flows.deploy_command import cron_or_off, known_zone, register, remarks, server_required
from flows.deployments import Chain, deployments_of, pools_of, reactions_of

ROOT = Path(__file__).resolve().parents[2]


def run_deploy(*arguments: str):
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    return CliRunner().invoke(app, ["deploy", *arguments])


def test_without_a_server_the_way_out_is_named(monkeypatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with pytest.raises(ConfigError, match="make stack"):
        server_required()
    assert isinstance(run_deploy(str(ROOT / "configs/quickstart.yaml")).exception, ConfigError)


def test_choices_become_a_chain(monkeypatch, tmp_path) -> None:
    chains: list[Chain] = []
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    monkeypatch.setenv("NIGHTJAR_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(deploy_module, "deploy", lambda chain: chains.append(chain) or ["pool cpu is there"])
    done = run_deploy(
        str(ROOT / "configs/quickstart.yaml"), "ppo.rounds=2", "--cron", "off", "--watch-cron", "0 1 * * *",
        "--timezone", "Europe/Berlin", "--approval-hours", "8", "--gpu-job", "image=nightjar-gpu:1", "--no-gpu-pool",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    (chain,) = chains
    assert (chain.name, chain.model) == ("quickstart", "quickstart-policy")
    assert chain.config == str(ROOT / "configs/quickstart.yaml")
    assert chain.home == str(tmp_path / "home")
    assert chain.working_dir == str(Path.cwd())
    assert (chain.overrides, chain.cron, chain.approval_hours) == (("ppo.rounds=2",), None, 8.0)
    assert (chain.gpu_pool, chain.gpu_job) == (False, {"image": "nightjar-gpu:1"})
    assert "pool cpu is there" in done.output
    assert "look: --watch-cron" in done.output


@pytest.mark.parametrize("text", ["", "* * *", "61 4 * * *", "daily"])
def test_what_is_no_cron_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no cron"):
        cron_or_off("--cron", text)


def test_an_unknown_zone_is_refused() -> None:
    assert known_zone("Europe/Berlin") == "Europe/Berlin"
    with pytest.raises(ConfigError, match="Europe/Atlantis"):
        known_zone("Europe/Atlantis")


@pytest.mark.parametrize(
    ("cron", "zone", "warned"),
    [
        ("30 2 * * *", "Europe/Berlin", True),
        ("0 0-4 * * *", "America/New_York", True),
        ("0 1,13 * * *", "Europe/Berlin", True),
        ("0 */2 * * *", "Europe/Berlin", True),
        ("0 0-4/2 * * *", "Europe/Berlin", True),
        ("0 1/6 * * *", "Europe/Berlin", True),
        ("15 * * * *", "Europe/Berlin", True),
        ("0 */6 * * *", "Europe/Berlin", False),
        ("0 3/6 * * *", "Europe/Berlin", False),
        ("30 2 * * *", "UTC", False),
        ("0 3 * * *", "Europe/Berlin", False),
        ("0 12 * * *", "Europe/Berlin", False),
    ],
)
def test_hours_in_which_clocks_change_are_remarked(cron: str, zone: str, warned: bool) -> None:
    assert bool(remarks(replace(CHAIN, cron=cron, watch_cron=None, timezone=zone))) is warned


def test_without_limits_no_watch_is_scheduled_and_deploy_says_so(monkeypatch, tmp_path) -> None:
    chains: list[Chain] = []
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    monkeypatch.setenv("NIGHTJAR_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(deploy_module, "deploy", lambda chain: chains.append(chain) or [])
    config = str(ROOT / "configs/quickstart.yaml")

    def watch_of(*arguments: str) -> tuple[str | None, str]:
        done = run_deploy(config, *arguments)
        assert done.exit_code == 0, done.output
        (cron,) = (one.cron for one in deployments_of(chains[-1]) if one.flow == "watch")
        return cron, done.output

    assert watch_of() == ("30 */6 * * *", "")
    cron, told = watch_of("watch.limits=[]")
    assert cron is None
    assert "look: " in told
    assert "has no limits under watch:" in told
    assert watch_of("watch.limits=[]", "--watch-cron", "off") == (None, ""), "somebody has said so"


@pytest.mark.parametrize("text", ["image", "=x", "env=A"])
def test_job_variables_are_pairs(monkeypatch, text: str) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    done = run_deploy(str(ROOT / "configs/quickstart.yaml"), "--cpu-job", text)
    assert isinstance(done.exception, ConfigError)


@pytest.fixture(scope="module")
def described() -> dict:
    text = (ROOT / "prefect.yaml").read_text(encoding="utf-8")
    for variable, value in (("NIGHTJAR_CONFIG", "/etc/night.yaml"), ("NIGHTJAR_HOME", "/srv/nightjar")):
        text = text.replace("{{ $" + variable + " }}", value)
    assert "{{ $" not in text
    return yaml.safe_load(text)


CHAIN = Chain("quickstart", "quickstart-policy", config="/etc/night.yaml", home="/srv/nightjar", approval_hours=12)


def test_prefect_yaml_describes_the_same_deployments(described) -> None:
    by_flow = {entry["entrypoint"].split(".")[1]: entry for entry in described["deployments"]}
    assert len(by_flow) == len(described["deployments"])
    assert sorted(by_flow) == sorted(wanted.flow for wanted in deployments_of(CHAIN))
    for wanted in deployments_of(CHAIN):
        entry = by_flow[wanted.flow]
        pool = entry["work_pool"]
        assert (entry["name"], entry["entrypoint"], pool["name"]) == (wanted.name, wanted.entrypoint, wanted.pool)
        assert entry["description"] == wanted.description
        assert (entry.get("parameters") or {}) == wanted.parameters
        assert pool["job_variables"] == wanted.job_variables
        crons = [(s["cron"], s["timezone"]) for s in entry["schedules"]]
        assert crons == ([(wanted.cron, wanted.timezone)] if wanted.cron else [])
        strategy = {"cancel": "CANCEL_NEW", "wait": "ENQUEUE"}.get(str(wanted.alone))
        limit = {"limit": 1, "collision_strategy": strategy, "grace_period_seconds": 600}
        assert entry.get("concurrency_limit") == (limit if wanted.alone else None)
        assert entry["enforce_parameter_schema"] is True


def test_prefect_yaml_describes_the_same_reactions(described) -> None:
    triggers = {one["name"]: (entry, one) for entry in described["deployments"] for one in entry.get("triggers", [])}
    assert sorted(triggers) == sorted(reaction.name for reaction in reactions_of(CHAIN))
    for reaction in reactions_of(CHAIN):
        entry, trigger = triggers[reaction.name]
        assert f"{entry['entrypoint'].split('.')[1]}/{entry['name']}" == reaction.runs
        assert sorted(trigger["expect"]) == sorted(reaction.expect)
        assert trigger["parameters"] == reaction.parameters
        if reaction.model is not None:
            assert trigger["match"] == {"prefect.resource.id": f"nightjar.model.{reaction.model}"}
        else:
            # Prefect's own command knows no id of another deployment beforehand: it goes by flow and name.
            flows = [full_name.split("/")[0] for full_name in reaction.after_runs_of]
            assert {full_name.split("/")[1] for full_name in reaction.after_runs_of} == {entry["name"]}
            assert trigger["match_related"] == [
                {"prefect.resource.role": "flow", "prefect.resource.name": flows if len(flows) > 1 else flows[0]},
                {"prefect.resource.role": "deployment", "prefect.resource.name": entry["name"]},
            ]


def test_every_entrypoint_is_a_flow_of_that_name() -> None:
    for wanted in deployments_of(CHAIN):
        module, _, name = wanted.entrypoint.rpartition(".")
        found = getattr(importlib.import_module(module), name)
        assert isinstance(found, Flow)
        assert found.name == wanted.flow


def test_relative_paths_of_a_config_start_where_the_chain_says() -> None:
    for wanted in deployments_of(replace(CHAIN, working_dir="/srv/project", gpu_job={"image": "gpu:1"})):
        assert wanted.job_variables["working_dir"] == "/srv/project"
        assert wanted.job_variables.get("image") == ("gpu:1" if wanted.pool == "gpu" else None)


def test_pools() -> None:
    assert pools_of(CHAIN) == {"cpu": None, "gpu": None}
    assert pools_of(replace(CHAIN, gpu_slots=4)) == {"cpu": None, "gpu": 4}
    assert pools_of(replace(CHAIN, gpu_pool=False, gpu_slots=4)) == {"cpu": None}
