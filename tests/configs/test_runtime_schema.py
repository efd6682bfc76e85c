"""How ranks share the work: what contradicts itself is refused, in words."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from configs.schema.runtime import RuntimeConfig
from tasks.launch_plan import DISTRIBUTED, LaunchPlan
from training.process import STRATEGY, ZERO_STAGE


def test_one_rank_has_nobody_to_share_with():
    with pytest.raises(ValidationError, match="one rank has nobody to share with"):
        RuntimeConfig(strategy="fsdp2")
    assert RuntimeConfig(strategy="fsdp2", nproc_per_node=2).strategy == "fsdp2"


def test_the_zero_stage_is_deepspeeds():
    with pytest.raises(ValidationError, match="remove zero_stage"):
        RuntimeConfig(strategy="fsdp2", zero_stage=1, nproc_per_node=2)
    with pytest.raises(ValidationError, match="zero_stage"):
        RuntimeConfig(strategy="deepspeed", zero_stage=4, nproc_per_node=2)
    stages = {given: RuntimeConfig(strategy="deepspeed", zero_stage=given, nproc_per_node=2) for given in (None, 0, 3)}
    assert [config.effective_zero_stage for config in stages.values()] == [2, 0, 3]
    assert RuntimeConfig().effective_zero_stage == 0


def test_several_nodes_need_a_meeting_place():
    with pytest.raises(ValidationError, match="rdzv_endpoint"):
        RuntimeConfig(nnodes=2)


@pytest.mark.parametrize("stage", [*sorted(DISTRIBUTED), "evaluate"])
def test_the_strategy_reaches_the_stages_that_several_ranks_share(stage):
    plan = LaunchPlan.of(RuntimeConfig(strategy="fsdp2", nproc_per_node=2), stage)
    assert plan.environment(stage, {})[STRATEGY] == ("fsdp2" if stage in DISTRIBUTED else "ddp")
    plan = LaunchPlan.of(RuntimeConfig(strategy="deepspeed", zero_stage=1, nproc_per_node=2), stage)
    assert plan.environment(stage, {})[ZERO_STAGE] == ("1" if stage in DISTRIBUTED else "0")
    assert ("torch.distributed.run" in plan.command(stage, Path("stage"))) == (stage in DISTRIBUTED)
