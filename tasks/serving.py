"""The parent's end of the serving child: log a version, or load one and let it answer, with bounded waiting."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tasks.mlflow_client import mlflow_environment
from tasks.registry_errors import ServingError

_LAST_WORDS = 1_500
_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Answers:
    """What a loaded version said, and the identifier of the stored model that said it."""

    model_id: str
    texts: tuple[str, ...]


@dataclass(frozen=True)
class LoggedVersion:
    """A version that was just created, its stored model and its run."""

    version: str
    model_id: str
    run_id: str


class ServingWorker:
    """A context manager around one child process. Downloads of the child go to a folder that is removed at the end.

    Every call raises ServingError when the child fails, dies or takes longer than `timeout_seconds`.
    """

    def __init__(self, tracking_uri: str, scratch: Path, timeout_seconds: float) -> None:
        self.tracking_uri = tracking_uri
        self._scratch = scratch
        self._timeout = timeout_seconds
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServingWorker:
        self._scratch.mkdir(parents=True, exist_ok=True)
        self._folder = tempfile.TemporaryDirectory(prefix="serving-", dir=self._scratch, ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        self._log = folder / "log.txt"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tasks.serving_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(folder),
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._folder.cleanup()

    @property
    def alive(self) -> bool:
        """Whether the child is there and can be asked."""
        return self._process is not None and self._process.poll() is None

    def answer(self, uri: str, prompts: Sequence[str], max_new_tokens: int) -> Answers:
        """Load `uri` (a models:/ URI or a folder) and answer `prompts` greedily."""
        request = {"uri": uri, "tracking_uri": self.tracking_uri, "prompts": prompts, "max_new_tokens": max_new_tokens}
        reply = self._ask(f"loading {uri} and answering", "answer", request)
        texts = tuple(reply["answers"])
        if len(texts) != len(prompts):
            raise ServingError(f"{uri} gave {len(texts)} answers to {len(prompts)} prompts")
        return Answers(reply["model_id"], texts)

    def log_version(self, **request: Any) -> LoggedVersion:
        """Log and register; see tasks.serving_worker.log_version for the fields."""
        reply = self._ask("logging the version", "log", {"tracking_uri": self.tracking_uri, **request})
        return LoggedVersion(reply["version"], reply["model_id"], reply["run_id"])

    def _ask(self, what: str, operation: str, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": operation, **request}).encode() + b"\n")
            self._process.stdin.flush()
            line = self._read_line()
        except BrokenPipeError:
            line = b""
        except BaseException:
            self._process.kill()  # a late reply must not be taken for the answer to the next question
            raise
        if not line:
            self._process.kill()
            ended = f"the serving child ended or took over {self._timeout:g} s"
            raise ServingError(f"{what}: {ended}\n{self._last_words()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise ServingError(f"{what}: {reply['error']}")
        return reply

    def _read_line(self) -> bytes:
        """One line of the child, or nothing when it ended or the time is up."""
        assert self._process is not None
        assert self._process.stdout is not None
        deadline, received = time.monotonic() + self._timeout, b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not received.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return b""
                part = os.read(self._process.stdout.fileno(), 65_536)
                if not part:
                    return b""
                received += part
        return received

    def _last_words(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-_LAST_WORDS:]


def _environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join(part for part in (str(_ROOT), os.environ.get("PYTHONPATH", "")) if part)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return inherited | mlflow_environment() | {
        "PYTHONPATH": path,
        "TMPDIR": str(folder),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    }
