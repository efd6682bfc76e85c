"""The process of the next stage, started ahead of its turn: its imports take seconds that a free core has to spare.

It loads what the stage needs, then waits for one line on its standard input. A closed input, which is what the death
of its parent looks like, ends it.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from tasks.launch_plan import MODULES, LaunchPlan, available_cores
from tasks.process_tree import end_processes, start_child
from training.contract import LOG, SPEC

READY = "--ready"


@dataclass(frozen=True)
class _Waiting:
    plan: LaunchPlan
    process: subprocess.Popen[bytes]


class ReadyChildren:
    """Children that wait for their turn, by stage directory. Used by the one thread that runs the night."""

    def __init__(self) -> None:
        self._waiting: dict[Path, _Waiting] = {}

    def prepare(self, stage: str, directory: Path, plan: LaunchPlan) -> bool:
        """Start the child of `stage` and let it wait; False where that would not pay or not be clean.

        A stage that uses every core would be slowed down by as much as is saved, ranks start each other, modules
        outside `training` know no --ready, and a directory that holds a spec may yet be moved aside.
        """
        if stage in MODULES or plan.is_distributed or plan.threads_per_rank() >= available_cores():
            return False
        if directory in self._waiting or (directory / SPEC).exists():
            return False
        directory.mkdir(parents=True, exist_ok=True)
        command = [*plan.command(stage, directory), READY]
        child = start_child(command, directory, directory / LOG, plan.environment(stage), stdin=subprocess.PIPE)
        self._waiting[directory] = _Waiting(plan, child)
        return True

    def take(self, directory: Path, plan: LaunchPlan) -> subprocess.Popen[bytes] | None:
        """The waiting child, told to go; None when there is none that fits, and then none is left."""
        waiting = self._waiting.pop(directory, None)
        if waiting is None:
            return None
        if waiting.plan == plan and waiting.process.poll() is None and _told(waiting.process):
            return waiting.process
        _end(directory, waiting.process)
        return None

    def drop(self, directory: Path) -> None:
        """End the child that waits for `directory`, if one does: its stage is not needed."""
        waiting = self._waiting.pop(directory, None)
        if waiting is not None:
            _end(directory, waiting.process)

    def holds(self, directory: Path) -> bool:
        """Whether a child waits for `directory`."""
        return directory in self._waiting

    def end(self) -> None:
        """End every child that still waits."""
        for directory in list(self._waiting):
            self.drop(directory)


def _told(process: subprocess.Popen[bytes]) -> bool:
    assert process.stdin is not None, "started with a pipe"
    try:
        process.stdin.write(b"go\n")
        process.stdin.close()
    except BrokenPipeError:
        return False
    return True


def _end(directory: Path, process: subprocess.Popen[bytes]) -> None:
    end_processes(directory)
    process.wait()
    if process.stdin is not None and not process.stdin.closed:
        try:
            process.stdin.close()
        except BrokenPipeError:
            return
