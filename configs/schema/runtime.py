"""Where and how the stages run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.schema.base import Minutes, NonNegativeInt, PositiveInt, Seconds, Section, at_most


class RuntimeConfig(Section):
    """Processes, devices, retries, leases."""

    home: str | None = None
    """Folder of runs, snapshots, trajectories and journal; null: NIGHTJAR_HOME, or .nightjar in the working folder."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the stages."""
    threads: NonNegativeInt = 0
    """CPU threads of a stage; 0: all cores divided by the ranks."""
    nproc_per_node: PositiveInt = 1
    """Ranks a node; more than one starts torchrun."""
    nnodes: PositiveInt = 1
    """Nodes; more than one needs rdzv_endpoint."""
    rdzv_endpoint: str | None = None
    """host:port of the rendezvous for several nodes."""
    strategy: Literal["ddp", "fsdp2", "deepspeed"] = "ddp"
    """How several ranks share sft, reward, distill and ppo. ddp: replicas whose gradients are summed; fsdp2: weights,
    gradients and moments are spread over the ranks, for models that one device cannot hold; deepspeed: ZeRO, see
    zero_stage. The same numbers."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] | None = None
    """What DeepSpeed spreads: 0 nothing, 1 the optimiser's moments, 2 (null) gradients as well, 3 the weights, too."""
    retries: NonNegativeInt = 2
    """How often a stage whose process died is started again from its checkpoint."""
    stage_timeout_minutes: Minutes = 24 * 60.0
    """A stage that takes longer is ended and fails."""
    turn_wait_minutes: Minutes = 12 * 60.0
    """A night waits for the night of another chain on its home for this long, and then fails."""
    lease_seconds: Seconds = 60.0
    """A child ends itself when its parent has not renewed the lease for this long."""
    min_free_disk_gb: Annotated[float, Field(ge=0.0), at_most(1_000_000.0, "GB")] = 1.0
    """Free space below which no night starts."""
    keep_checkpoints: PositiveInt = 2
    """Checkpoints kept a stage, until the chain's next night begins."""

    @model_validator(mode="after")
    def _rendezvous(self) -> RuntimeConfig:
        if self.nnodes > 1 and not self.rdzv_endpoint:
            raise ValueError("runtime.nnodes > 1 needs runtime.rdzv_endpoint; write host:port of the first node")
        return self

    @property
    def effective_zero_stage(self) -> int:
        """The stage that DeepSpeed is run at; 0 without it."""
        if self.strategy != "deepspeed":
            return 0
        return 2 if self.zero_stage is None else self.zero_stage

    @model_validator(mode="after")
    def _zero_stage_of_deepspeed(self) -> RuntimeConfig:
        if self.zero_stage is not None and self.strategy != "deepspeed":
            raise ValueError(
                f"runtime.zero_stage is DeepSpeed's, but runtime.strategy is {self.strategy}; write "
                "`strategy: deepspeed` or remove zero_stage"
            )
        return self

    @model_validator(mode="after")
    def _something_to_share(self) -> RuntimeConfig:
        if self.strategy != "ddp" and self.nproc_per_node * self.nnodes == 1:
            raise ValueError(
                f"runtime.strategy is {self.strategy}, but one rank has nobody to share with; raise "
                "runtime.nproc_per_node or runtime.nnodes, or write `strategy: ddp`"
            )
        return self
