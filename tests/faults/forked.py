"""A function in a forked child: its own process to be killed, without paying for imports again."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Child:
    """The child, and where it leaves what it has to say."""

    pid: int
    file: Path
    status: int | None = None

    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if pid else None
        return self.status is None

    def signal_after(self, name: str, seconds: float) -> None:
        """Send the signal then, unless it has ended before."""
        deadline = time.monotonic() + seconds
        while self.is_alive() and time.monotonic() < deadline:
            time.sleep(0.005)
        if self.is_alive():
            os.kill(self.pid, signal.Signals[name])

    def result(self, patience_seconds: float) -> Any:
        """What the function returned; None when it was killed. Raises AssertionError when it takes longer."""
        deadline = time.monotonic() + patience_seconds
        while self.is_alive():
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise AssertionError(f"the child was not done within {patience_seconds:g} s")
            time.sleep(0.005)
        if not self.file.exists():
            return None
        content = json.loads(self.file.read_text(encoding="utf-8"))
        self.file.unlink()
        return content


def fork(act: Callable[[], Any], folder: Path) -> Child:
    """Run `act` in a child; its return value must be JSON."""
    file = folder / f".child-{time.monotonic_ns()}.json"
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Child(pid, file)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        content = act()
        whole = file.with_suffix(".tmp")
        whole.write_text(json.dumps(content), encoding="utf-8")
        os.replace(whole, file)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)
