"""Running one stage in this process: spec in, result out. The frame around every stage function. Torch-free."""

from __future__ import annotations

import ctypes
import importlib.metadata
import logging
import math
import os
import platform
import signal
import sys
import threading
import time
from pathlib import Path

from training.context import StageContext, StageFunction
from training.contract import LEASE, METRICS, FileRef, StageResult, file_ref, read_spec, valid_result, write_result
from training.recorder import Recorder

LEASE_SECONDS = "NIGHTJAR_LEASE_SECONDS"
STRATEGY, ZERO_STAGE = "NIGHTJAR_STRATEGY", "NIGHTJAR_ZERO_STAGE"
_PR_SET_PDEATHSIG = 1
_VERSIONED = ("torch", "transformers", "peft", "numpy", "pyarrow", "great_expectations", "nightjar-rlhf")


def run_stage(directory: Path, function: StageFunction) -> StageResult:
    """Run `function` for the spec in `directory` and write the manifest. A valid manifest is returned as it is."""
    spec = read_spec(directory)
    done = valid_result(directory, spec.key)
    if done is not None:
        return done
    for ref in spec.inputs.values():
        ref.verify()
    main_rank = os.environ.get("RANK", "0") == "0"
    recorder = Recorder(directory / METRICS, enabled=main_rank)
    started = time.monotonic()
    outcome = function(StageContext(directory, spec, recorder))
    recorder.close()
    result = StageResult(
        stage=spec.stage,
        key=spec.key,
        outputs={role: file_ref(path) for role, path in outcome.outputs.items()} if main_rank else {},
        metrics={key: value if math.isfinite(value) else None for key, value in outcome.metrics.items()},
        facts=dict(outcome.facts) | peak_memory(),
        wall_seconds=time.monotonic() - started,
        versions=versions(),
    )
    if main_rank:
        write_result(directory, result)
    return result


def peak_memory() -> dict[str, float]:
    """Of this process, in MiB: `peak_memory_mb`, resident, and `peak_gpu_memory_mb`, allocated, if a GPU was used."""
    found = {"peak_memory_mb": round(_peak_resident_kilobytes() / 1024, 1)}
    torch = sys.modules.get("torch")  # never imported for this: some stages do without
    if torch is not None and torch.cuda.is_initialized():
        found["peak_gpu_memory_mb"] = round(torch.cuda.max_memory_allocated() / 1024**2, 1)
    return found


def _peak_resident_kilobytes() -> float:
    """The kernel's high-water mark of this program; getrusage would count the parent's memory at the start as well."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        import resource  # only POSIX has it, and so only the stages need it

        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def versions() -> dict[str, str]:
    """Versions of what made the result."""
    found = {"python": platform.python_version()}
    for name in _VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def die_with_parent() -> None:
    """Ask the kernel (Linux) to kill this process when the one that started it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def watch_lease(directory: Path) -> None:
    """End this process when the parent has stopped renewing `lease`; without NIGHTJAR_LEASE_SECONDS do nothing.

    This holds where the parent-death signal does not: behind torchrun, on another node, on other systems.
    """
    seconds = float(os.environ.get(LEASE_SECONDS, "0"))
    if seconds <= 0:
        return
    started = time.time()

    def watch() -> None:
        while True:
            time.sleep(min(5.0, seconds / 4))
            try:
                renewed = max((directory / LEASE).stat().st_mtime, started)
            except FileNotFoundError:
                renewed = started
            if time.time() - renewed > seconds:
                logging.getLogger(__name__).error("the parent stopped renewing the lease: ending")
                os._exit(75)

    threading.Thread(target=watch, name="lease", daemon=True).start()


def describe(ref: FileRef) -> str:
    """A short name for logs: place and the head of its hash."""
    return f"{ref.path}@{ref.sha256[:12]}"
