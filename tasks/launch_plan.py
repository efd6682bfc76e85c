"""How a stage's child process is started: command line and environment, derived from the config's runtime section."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from configs.schema.runtime import RuntimeConfig
from training.process import LEASE_SECONDS, STRATEGY, ZERO_STAGE

ROOT = Path(__file__).resolve().parent.parent
MODULES = {"validate": "tasks"}
"""Package that holds a stage; every other stage is in `training`."""
DISTRIBUTED = frozenset({"sft", "reward", "distill", "ppo"})
"""Stages that several ranks share; the others run as one process whatever the config says."""
READS_SOURCE = "validate"
"""The one stage that reads data.source, which may lie in a private bucket. It loads no model."""
_SERVERS = ("PREFECT_", "MLFLOW_")
_CLOUDS = ("AWS_", "AZURE_", "GOOGLE_")


@dataclass(frozen=True)
class LaunchPlan:
    """Processes, limits and patience of one stage. Times in seconds."""

    nproc_per_node: int = 1
    nnodes: int = 1
    rdzv_endpoint: str | None = None
    strategy: str = "ddp"
    zero_stage: int = 0
    device: str = "auto"
    threads: int = 0
    retries: int = 2
    timeout: float = 86_400.0
    lease: float = 60.0
    retry_pause: float = 2.0

    @classmethod
    def of(cls, runtime: RuntimeConfig, stage: str) -> LaunchPlan:
        """The plan for `stage` under a config's runtime section."""
        shared = stage in DISTRIBUTED
        return cls(
            nproc_per_node=runtime.nproc_per_node if shared else 1,
            nnodes=runtime.nnodes if shared else 1,
            rdzv_endpoint=runtime.rdzv_endpoint if shared else None,
            strategy=runtime.strategy if shared else "ddp",
            zero_stage=runtime.effective_zero_stage if shared else 0,
            device=runtime.device,
            threads=runtime.threads,
            retries=runtime.retries,
            timeout=runtime.stage_timeout_minutes * 60.0,
            lease=runtime.lease_seconds,
        )

    @property
    def is_distributed(self) -> bool:
        """Whether torchrun is needed."""
        return self.nproc_per_node > 1 or self.nnodes > 1

    def command(self, stage: str, directory: Path) -> list[str]:
        """The command line; the same works by hand."""
        stage_arguments = ["-m", MODULES.get(stage, "training"), stage, str(directory)]
        if not self.is_distributed:
            return [sys.executable, *stage_arguments]
        return [sys.executable, "-m", "torch.distributed.run", *self._rendezvous(), *stage_arguments]

    def environment(self, stage: str, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """The child's environment: without credentials of servers and clouds, with threads, device and lease.

        The stage that reads the source keeps the clouds' credentials: it could not open what preflight opened.
        """
        private = _SERVERS if stage == READS_SOURCE else _SERVERS + _CLOUDS
        environment = {
            name: value
            for name, value in (os.environ if base is None else base).items()
            if not name.startswith(private)
        }
        threads = str(self.threads_per_rank())
        environment |= {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")])),
            "HF_HUB_OFFLINE": "1",
            "DO_NOT_TRACK": "1",
            "NIGHTJAR_DEVICE": self.device,
            STRATEGY: self.strategy,
            ZERO_STAGE: str(self.zero_stage),
            LEASE_SECONDS: str(self.lease),
        }
        return environment

    def threads_per_rank(self) -> int:
        """CPU threads of one rank; 0 in the config means: this machine's cores shared out."""
        return self.threads or max(1, available_cores() // self.nproc_per_node)

    def _rendezvous(self) -> list[str]:
        ranks = f"--nproc-per-node={self.nproc_per_node}"
        if self.nnodes == 1:
            # A free port for each run: two jobs on torchrun's default port would meet each other.
            return [ranks, "--nnodes=1", f"--master-port={free_port()}", "--master-addr=127.0.0.1"]
        backend = ["--rdzv-backend=c10d", f"--rdzv-endpoint={self.rdzv_endpoint}"]
        return [ranks, f"--nnodes={self.nnodes}", *backend]


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_port() -> int:
    """A port that is free on loopback now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
