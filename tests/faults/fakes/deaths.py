"""Moments at which the process of a night, or of a rollback, can be told to kill itself: NIGHTJAR_DIE_AT names one.

before_move: the intention is in the journal; after_move: the alias has moved; before_closing: everything is proved but
not written down; inside_closing: half of that line is; after_closing: it is, and the caller does not know.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from typing import Any

import pytest

from tasks.append_log import AppendLog
from tasks.registry import CHAMPION, ModelRegistry

MOMENTS = ("before_move", "after_move", "before_closing", "inside_closing", "after_closing")
_CLOSING = ("verified", "rolled_back")


def plant_deaths(patch: pytest.MonkeyPatch) -> None:
    set_alias, append = ModelRegistry.set_alias, AppendLog.append

    def deadly_set_alias(self: ModelRegistry, alias: str, version: str) -> None:
        if alias == CHAMPION:
            _die_if("before_move")
        set_alias(self, alias, version)
        if alias == CHAMPION:
            _die_if("after_move")

    def deadly_append(self: AppendLog, record: Mapping[str, Any]) -> Mapping[str, Any]:
        closing = record.get("event") in _CLOSING
        if closing:
            _die_if("before_closing")
            _die_if("inside_closing", self, record)
        written = append(self, record)
        if closing:
            _die_if("after_closing")
        return written

    patch.setattr(ModelRegistry, "set_alias", deadly_set_alias)
    patch.setattr(AppendLog, "append", deadly_append)


def _die_if(moment: str, log: AppendLog | None = None, record: Mapping[str, Any] | None = None) -> None:
    if os.environ.get("NIGHTJAR_DIE_AT") != moment:
        return
    if log is not None:
        with log.path.open("ab") as stream:
            stream.write(json.dumps({"seq": 0, **(record or {})}).encode()[:40])
    os.kill(os.getpid(), signal.SIGKILL)
