"""How ranks share the work: what contradicts itself is refused, in words."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from configs.schema.runtime import RuntimeConfig
from tasks.launch_plan import DISTRIBUTED, LaunchPlan
from training.process import STRATEGY


def test_one_rank_has_nobody_to_share_with():
    with pytest.raises(ValidationError, match="one rank has nobody to share with"):
        RuntimeConfig(strategy="fsdp2")
    assert RuntimeConfig(strategy="fsdp2", nproc_per_node=2).strategy == "fsdp2"


def test_several_nodes_need_a_meeting_place():
    with pytest.raises(ValidationError, match="rdzv_endpoint"):
        RuntimeConfig(nnodes=2)


@pytest.mark.parametrize("stage", [*sorted(DISTRIBUTED), "evaluate"])
def test_the_strategy_reaches_the_stages_that_several_ranks_share(stage):
    plan = LaunchPlan.of(RuntimeConfig(strategy="fsdp2", nproc_per_node=2), stage)
    assert plan.environment(stage, {})[STRATEGY] == ("fsdp2" if stage in DISTRIBUTED else "ddp")
    assert ("torch.distributed.run" in plan.command(stage, Path("stage"))) == (stage in DISTRIBUTED)
