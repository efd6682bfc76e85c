"""Making torch ready for one stage: threads, device, determinism."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def prepare_torch(directory: Path) -> None:
    """Set threads from OMP_NUM_THREADS, and refuse nondeterministic CPU kernels. `directory` is only for messages."""
    threads = int(os.environ.get("OMP_NUM_THREADS", "0"))
    if threads > 0:
        torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    _quiet_transformers()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        torch.backends.cudnn.benchmark = False


def _quiet_transformers() -> None:
    """No bars and load reports in a stage's log: missing weights are checked, strictly, where models are loaded."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def pick_device() -> torch.device:
    """The device of this process: NIGHTJAR_DEVICE (auto, cpu, cuda), by default the GPU when there is one."""
    wanted = os.environ.get("NIGHTJAR_DEVICE", "auto")
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def pick_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """bfloat16 only where it is native: it is many times slower than float32 on most CPUs."""
    if wanted == "auto":
        bfloat16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if bfloat16 else torch.float32
    return torch.bfloat16 if wanted == "bfloat16" else torch.float32
