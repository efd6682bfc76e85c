"""A process that promotes and is killed at a chosen moment. Run by test_registry_faults; not a test itself.

Arguments: home, candidate, judged_against (or "none"), moment, and the file descriptors of a serving child to borrow.
Moments: before_move, after_move, before_verified, inside_verified (half of the journal's line is written), never.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from configs.errors import NightjarError
from configs.schema.registry import RegistryConfig
from tasks.append_log import AppendLog
from tasks.journal import Journal
from tasks.promotion import promote
from tasks.registry import CHAMPION, ModelRegistry
from tasks.serving import ServingWorker
from tasks.site import Site


class DyingRegistry(ModelRegistry):
    """Killed around the move of the alias."""

    moment = "never"

    def set_alias(self, alias: str, version: str) -> None:
        if alias == CHAMPION and self.moment == "before_move":
            die()
        super().set_alias(alias, version)
        if alias == CHAMPION and self.moment == "after_move":
            die()


class DyingLog(AppendLog):
    """Killed before or inside the line that says `verified`."""

    moment = "never"

    def append(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        if record["event"] == "verified" and self.moment in ("before_verified", "inside_verified"):
            if self.moment == "inside_verified":
                with self.path.open("ab") as stream:
                    stream.write(json.dumps({"seq": 99, **record}).encode()[:40])
            die()
        return super().append(record)


class BorrowedWorker(ServingWorker):
    """Speaks to a serving child that somebody else started."""

    def __init__(self, tracking_uri: str, write_to: int, read_from: int) -> None:
        super().__init__(tracking_uri, Path(os.devnull), 120.0)
        pipes = {"stdin": os.fdopen(write_to, "wb", 0), "stdout": os.fdopen(read_from, "rb", 0)}
        self._process = SimpleNamespace(**pipes, poll=lambda: None, kill=lambda: None)  # type: ignore[assignment]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(home: str, candidate: str, judged_against: str, moment: str, write_to: str, read_from: str) -> None:
    plain = Site.open(Path(home), RegistryConfig(lock_wait_seconds=60, verify_max_new_tokens=4))
    registry, journal = DyingRegistry(plain.model, plain.tracking_uri), Journal(plain.home)
    journal.log = DyingLog(journal.log.path)
    registry.moment = journal.log.moment = moment
    borrowed = BorrowedWorker(plain.tracking_uri, int(write_to), int(read_from))
    site = dataclasses.replace(plain, registry=registry, journal=journal, shared=borrowed)
    try:
        promote(site, candidate, judged_against=None if judged_against == "none" else judged_against)
    except NightjarError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
