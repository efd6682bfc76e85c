"""One stage directory, run where the GPUs are: what a night hands over, and what a person may start by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from prefect import State, flow, task
from prefect.runtime import flow_run
from prefect.states import Completed, Failed
from pydantic import Field

from configs.errors import NightjarError
from configs.schema.runtime import RuntimeConfig
from flows.flow_log import FlowLog
from flows.forms import Form
from flows.night_tasks import ACT
from flows.signs_of_life import Handover, ending_with_the_night, shown_at_work
from tasks.launch import StageRun, run_stage
from tasks.launch_plan import LaunchPlan
from tasks.progress import listener, listening
from training.contract import StageSpec, read_spec
from training.disk import full_disk_in_words


class TrainRequest(Form):
    """Which stage runs, and with which processes."""

    directory: Annotated[
        str,
        Field(
            title="Stage directory",
            min_length=1,
            description="Holds spec.json and receives result.json. By hand: a directory of an earlier night; a "
            "finished one computes nothing, a half-finished one goes on from its checkpoint.",
            examples=["/var/lib/nightjar/runs/nightly-0007/ppo"],
        ),
    ]
    runtime: Annotated[
        RuntimeConfig, Field(title="Runtime", description="Processes, device, retries: `runtime:` of the night.")
    ] = RuntimeConfig()
    handover: Annotated[
        str | None,
        Field(
            title="Handover folder",
            description="Set by a night: where it left the spec and renews its lease. Leave empty by hand.",
        ),
    ] = None


def _run_name() -> str:
    request = flow_run.parameters.get("request") or {}
    directory = request.directory if isinstance(request, TrainRequest) else str(request.get("directory", "stage"))
    return " ".join(Path(directory).parts[-2:])


@flow(name="train", flow_run_name=_run_name, persist_result=False, log_prints=False)
def train(request: TrainRequest) -> State[Any]:
    """Bring one stage to its result. Ends failed with the stage's own words when a person must act.

    Success is the result.json in the directory; the night that asked reads that, not this flow's state.
    """
    try:
        handover = Handover(Path(request.handover)) if request.handover else None
        spec = read_spec(handover.folder if handover else Path(request.directory))
        plan = LaunchPlan.of(request.runtime, spec.stage)
        with (
            shown_at_work(Path(spec.home)),
            listening(FlowLog(listener())),
            ending_with_the_night(handover, plan.lease),
            full_disk_in_words(Path(request.directory)),
        ):
            done = run_task(spec.stage, spec, request.directory, plan)
    except NightjarError as error:
        return Failed(message=str(error))
    how = "was there already" if done.reused else f"is done after {done.seconds:.0f} s"
    return Completed(message=f"stage {spec.stage} of night {spec.night} {how}")


@task(name="stage", task_run_name="{stage}", **ACT)
def run_task(stage: str, spec: StageSpec, directory: str, plan: LaunchPlan) -> StageRun:
    """The child process; the launcher retries it from its checkpoint."""
    return run_stage(spec, Path(directory), plan)
