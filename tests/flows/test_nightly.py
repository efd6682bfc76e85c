"""Whole nights through the real Prefect flow and a real MLflow store, on small stages in real child processes."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from uuid import UUID

import pytest
from prefect import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, LogFilter, LogFilterFlowRunId
from prefect.logging.handlers import APILogHandler

from tasks.last_config import site_of
from tasks.night_lock import only_night
from tasks.night_state import NightBook
from tasks.registry import CHALLENGER, CHAMPION

pytestmark = pytest.mark.usefixtures("light_registry")
ACTS = ["gate", "register", "promote"]
STAGES = ["validate", "base", "sft", "reward", "distill", "annotate", "ppo", "evaluate"]


def state_of(nights, index: int):
    return NightBook(nights.home).load(f"fake-{index:04d}")


def spec_of(nights, index: int, stage: str) -> dict:
    return json.loads((nights.home / f"runs/fake-{index:04d}/{stage}/spec.json").read_text())


def inputs_of(nights, index: int, stage: str) -> dict[str, str]:
    return {role: ref["sha256"] for role, ref in spec_of(nights, index, stage)["inputs"].items()}


def output_of(nights, index: int, stage: str, role: str) -> str:
    result = json.loads((nights.home / f"runs/fake-{index:04d}/{stage}/result.json").read_text())
    return result["outputs"][role]["sha256"]


def logs_of(flow_run_id: str) -> list[tuple[int, str]]:
    """(level, message) of everything that Prefect's page shows for a flow run."""

    async def read():
        async with get_client() as client:
            wanted = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[UUID(flow_run_id)]))
            return await client.read_logs(wanted, limit=200)

    APILogHandler().flush()
    return [(log.level, log.message) for log in asyncio.run(read())]


@pytest.fixture(scope="module")
def chain(new_home, light_registry):
    """Three starts in one home, whose generator has data for two nights."""
    nights = new_home()
    states, heard = [], []
    for _ in range(3):
        states.append(nights.run())
        heard.append(nights.heard)
    return nights, states, heard


def test_the_first_night_promotes_and_shows_its_page(chain) -> None:
    nights, states, heard = chain
    assert states[0].is_completed(), states[0].message
    assert [stage for stage, _ in heard[0].ended] == STAGES
    assert state_of(nights, 1).promoted
    page = heard[0].pages[-1]
    assert (page.version, page.alias) == ("1", "champion")
    assert [line.stage for line in page.stages] == [*STAGES, *ACTS]
    assert page.headline == "promoted: version 1 is champion; the one blocking rule holds"
    shown = {figure.name: figure.value for figure in page.figures}
    assert shown["teacher accuracy on held-out pairs"] == "0.810"
    assert shown["student-teacher KL on held-out pairs"] == "0.012 nats"
    assert "[" in shown["gold reward, new policy"]
    assert any("nightjar ui" in step for step in page.next_steps)


def test_the_second_night_goes_on_from_the_champion(chain) -> None:
    nights, states, heard = chain
    assert states[1].is_completed(), states[1].message
    # The champion's reference anchors the second night, so neither base nor sft runs; PPO starts from its adapter.
    assert [stage for stage, _ in heard[1].ended] == [s for s in STAGES if s not in ("base", "sft")]
    assert inputs_of(nights, 2, "ppo")["reference"] == inputs_of(nights, 1, "ppo")["reference"]
    assert inputs_of(nights, 2, "ppo")["adapter"] == output_of(nights, 1, "ppo", "adapter")
    assert "policy" not in inputs_of(nights, 2, "ppo")
    assert "adapter" not in inputs_of(nights, 1, "ppo")
    assert inputs_of(nights, 2, "evaluate")["champion"] == output_of(nights, 1, "ppo", "policy")
    assert state_of(nights, 2).champion.version == "1"
    assert site_of(nights.home).registry.alias(CHAMPION) == "2"


def test_a_third_start_without_data_is_skipped(chain) -> None:
    nights, states, _ = chain
    assert (states[2].name, states[2].is_completed()) == ("Skipped", True)
    assert "no new data" in states[2].message
    assert len(NightBook(nights.home).nights()) == 2


def test_runs_in_mlflow_are_nested_and_ended(chain) -> None:
    nights, _, _ = chain
    client = site_of(nights.home).registry.client
    runs = client.search_runs([client.get_experiment_by_name("nightjar").experiment_id])
    assert {run.info.status for run in runs} == {"FINISHED"}
    first = {run.info.run_name: run for run in runs if run.data.tags["nightjar.night"] == "fake-0001"}
    parent = first.pop("fake-0001")
    assert set(first) == {*STAGES, *ACTS}
    assert {run.data.tags["mlflow.parentRunId"] for run in first.values()} == {parent.info.run_id}
    assert first["ppo"].data.metrics["loss"] == pytest.approx(1 / 3)
    assert parent.data.metrics["final/gold_reward"] > 0.3
    note = parent.data.tags["mlflow.note.content"]
    parts = ["promoted: version 1 is champion", "## Gate", "## Figures", "## Details"]
    assert sorted(parts, key=note.index) == parts
    assert note.count("95 % interval [") == 1, "the one rule is said once"
    described = client.get_model_version("nightjar-policy", "1").description
    assert described.startswith("**version 1 was promoted by night fake-0001; the one blocking rule holds**")
    for stage in STAGES:
        memory, seconds = (first[stage].data.metrics[f"final/{name}"] for name in ("peak_memory_mb", "wall_seconds"))
        assert memory > 10, stage
        assert seconds > 0, stage
    dataset = parent.inputs.dataset_inputs[0].dataset
    assert dataset.name == "preferences"
    data = client.get_model_version("nightjar-policy", "1").tags["nightjar.data_sha256"]
    assert data == parent.data.tags["nightjar.sha256.preferences"]
    assert data.startswith(dataset.digest), "version and data set can be joined"


def test_gate_register_and_promote_have_runs_of_their_own(chain) -> None:
    nights, _, _ = chain
    client = site_of(nights.home).registry.client
    (experiment,) = [client.get_experiment_by_name("nightjar").experiment_id]
    runs = client.search_runs([experiment], "tags.`nightjar.night` = 'fake-0002'")
    gate, register, promote = (next(r for r in runs if r.info.run_name == act) for act in ACTS)
    assert all(run.data.metrics["seconds"] > 0 for run in (gate, register, promote))
    assert {run.data.tags["nightjar.verdict"] for run in (gate, register, promote)} == {"PASS"}
    decision = json.loads((nights.home / "runs/fake-0002/gate/decision.json").read_text())
    (check,) = decision["rules"][-1]["checks"]
    label = decision["rules"][-1]["label"]
    logged = {name: gate.data.metrics[f"{label}/{name}"] for name in ("value", "low", "high", "limit", "passed")}
    assert logged == {**{name: check[name] for name in ("value", "low", "high", "limit")}, "passed": 1.0}
    assert gate.data.tags[f"rule.{label}"] == "PASS"
    stored = client.download_artifacts(gate.info.run_id, "gate/decision.json")
    assert json.loads(Path(stored).read_text()) == decision
    assert (register.data.tags["nightjar.version"], register.data.tags["nightjar.alias"]) == ("2", "challenger")
    assert (promote.data.tags["nightjar.version"], promote.data.tags["nightjar.alias"]) == ("2", "champion")
    assert promote.data.tags["nightjar.previous"] == "1"


def test_the_gates_page_says_what_became_of_the_night(chain) -> None:
    nights, _, _ = chain
    page = (nights.home / "runs/fake-0002/gate/decision.md").read_text()
    assert "**promoted: version 2 is champion; the one blocking rule holds**" in page
    client = site_of(nights.home).registry.client
    stored = client.download_artifacts(state_of(nights, 2).mlflow_run_id, "gate/decision.md")
    assert Path(stored).read_text() == page


def test_a_good_night_warns_of_nothing_in_prefect(chain) -> None:
    nights, _, _ = chain
    told = logs_of(state_of(nights, 1).flow_run_id)
    assert any("ppo starts, attempt 1" in message for _, message in told)
    assert (logging.INFO, "ppo: round 0: answers 3") in told
    assert [message for level, message in told if level >= logging.WARNING] == []


def test_task_runs_are_called_what_they_do(chain) -> None:
    nights, _, _ = chain

    async def read():
        async with get_client() as client:
            wanted = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(state_of(nights, 1).flow_run_id)]))
            return await client.read_task_runs(flow_run_filter=wanted)

    assert {run.name for run in asyncio.run(read())} == {"reconcile", *STAGES, *ACTS, "report"}


def test_each_night_draws_anew_and_its_evaluation_prompts_stay(chain) -> None:
    nights, _, _ = chain
    seeds = {index: {stage: spec_of(nights, index, stage)["seed"] for stage in STAGES[3:]} for index in (1, 2)}
    for stage in ("reward", "distill", "ppo", "evaluate"):
        assert seeds[1][stage] != seeds[2][stage], stage
    assert {spec_of(nights, index, "validate")["seed"] for index in (1, 2)} == {0}
    assert seeds[2]["ppo"] == state_of(nights, 2).seed
    assert seeds[2]["reward"] == state_of(nights, 2).data_seed
    assert "frozen_evaluation" in inputs_of(nights, 2, "validate")


def test_artifacts_in_prefect_hold_the_page(chain) -> None:
    from prefect.artifacts import Artifact

    _, _, heard = chain
    artifact = Artifact.get("fake-0001-summary")
    assert artifact is not None
    assert "gold reward" in artifact.data
    table = Artifact.get("fake-0001-table")
    assert table is not None
    assert json.loads(table.data) == heard[0].pages[-1].rows()
    assert {row["part"] for row in json.loads(table.data)} == {
        "verdict", "stage", "figure", "gate", "registered", "next"
    }  # fmt: skip


def test_a_worse_policy_is_kept_back_until_somebody_forces_one(nights, monkeypatch) -> None:
    monkeypatch.setenv("NIGHTJAR_FAKE", "evaluate=worse")
    state = nights.run()
    assert (state.name, state.is_failed()) == ("Rejected", True)
    assert "the champion stays" in state.message
    registry = site_of(nights.home).registry
    assert (registry.alias(CHAMPION), registry.alias(CHALLENGER)) == (None, "1")
    night = state_of(nights, 1)
    assert (night.status, night.verdict, night.promoted) == ("finished", "FAIL", False)
    assert (nights.home / "runs/fake-0001/gate/decision.json").is_file()
    assert "**not promoted: FAIL: not met" in (nights.home / "runs/fake-0001/gate/decision.md").read_text()

    forced = nights.run(again=True, force=True, who="ada", why="needed for the demonstration")
    assert forced.is_completed(), forced.message
    assert registry.alias(CHAMPION) == "2"
    assert "force" in nights.heard.pages[-1].headline


def test_an_undecided_gate_keeps_the_champion_and_says_so(nights, monkeypatch) -> None:
    monkeypatch.setenv("NIGHTJAR_FAKE", "evaluate=unsure")
    assert nights.run().name == "Undecided"


def test_a_failed_night_goes_on_and_a_killed_trainer_is_started_again(nights, monkeypatch) -> None:
    monkeypatch.setenv("NIGHTJAR_FAKE", "reward=user_error")
    state = nights.run()
    assert state.is_failed()
    assert "row 7 of pairs.jsonl" in state.message
    assert state_of(nights, 1).status == "failed"
    monkeypatch.setenv("NIGHTJAR_FAKE", "ppo=die_at_2")
    assert nights.run().is_completed()
    assert dict(nights.heard.ended)["sft"] == "reused"
    assert nights.starts("sft") == 1, "nothing is trained twice"
    assert nights.starts("ppo") == 2
    assert state_of(nights, 1).promoted
    (ppo,) = [row for row in nights.heard.pages[-1].rows() if row["what"] == "ppo"]
    assert ppo["in words"] == "done, 2 attempts", "retries are seen in the table"


def test_refused_before_any_compute_with_every_problem_at_once(nights, tmp_path) -> None:
    state = nights.run("models.base=" + str(tmp_path / "nowhere"), "runtime.min_free_disk_gb=1000000")
    assert state.is_failed()
    assert "nothing was computed" in state.message
    assert "models.base" in state.message
    assert "min_free_disk_gb" in state.message
    assert NightBook(nights.home).nights() == []


def test_mlflow_down_is_refused_before_any_compute(nights) -> None:
    state = nights.run("registry.tracking_uri=http://127.0.0.1:9", "registry.reach_timeout_seconds=3")
    assert state.is_failed()
    assert "not answer" in state.message
    assert NightBook(nights.home).nights() == []


def test_another_chain_s_night_is_waited_for_and_no_night_is_lost_green(nights, caplog) -> None:
    with only_night(nights.home, "another"):
        state = nights.run("runtime.turn_wait_minutes=0.005")
    assert state.is_failed()
    assert "a night of fake waited 0.005 minutes for its turn, and did not run" in state.message
    assert any("a night of another (pid" in note for note in nights.heard.notes)
    assert "waits for its turn" in caplog.text, "who looks at the flow run in Prefect sees why it goes on so long"
    assert NightBook(nights.home).nights() == []


def test_a_second_night_meanwhile_is_skipped(nights) -> None:
    with only_night(nights.home, "fake"):
        state = nights.run()
    assert (state.name, state.is_completed()) == ("Skipped", True)
    assert "another night is running" in state.message


def test_a_gate_that_too_few_samples_can_pass_is_said_before_any_training(nights) -> None:
    """Twelve prompts are held out of sixty pairs."""
    rule = "{metric: reward, direction: higher, baseline: reference, min_improvement: 0, min_n: 30}"
    state = nights.run(f"gates.rules=[{rule}]")
    assert state.is_failed()
    assert "reward_vs_reference needs 30 samples" in state.message
    assert [stage for stage, _ in nights.heard.ended] == ["validate"]
    assert nights.heard.pages, "the night's page tells it"
