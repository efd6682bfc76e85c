"""A drill: promote, break and roll back in a scratch registry, by the code that nights use.

Every step acts, and then looks for itself: at the alias in the registry, at the journal's lines, at what the champion
answers. What an act says of itself proves nothing here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Literal

from configs.errors import NightjarError
from tasks.drill_scratch import Scratch
from tasks.drill_steps import STEPS, Exercise

Outcome = Literal["ok", "failed", "not run"]


@dataclass(frozen=True)
class Step:
    """One line of the report: what was done, what was then seen, seconds, and how it went."""

    name: str
    done: str
    seen: str
    seconds: float
    outcome: Outcome


def drill(on_server: bool) -> Generator[Step]:
    """Run the drill, handing out each step when it has ended; the last one is the clean-up, whatever came before.

    After a failed step the rest is not run. Raises NightjarError when the server that is wanted is not named.
    """
    scratch = Scratch.make(on_server)
    try:
        yield from _steps(scratch)
    finally:
        clean_up = _timed(Exercise("clean up", "remove everything that the drill has made", Scratch.remove), scratch)
    yield clean_up


def _steps(scratch: Scratch) -> Generator[Step]:
    with scratch.site.warm() as scratch.site:
        failed = False
        for exercise in STEPS:
            step = _not_run(exercise) if failed else _timed(exercise, scratch)
            failed = failed or step.outcome == "failed"
            yield step


def _timed(exercise: Exercise, scratch: Scratch) -> Step:
    started = time.monotonic()
    act: Callable[[Scratch], str] = exercise.act
    outcome: Outcome = "ok"
    try:
        seen = act(scratch)
    except NightjarError as error:
        seen, outcome = str(error), "failed"
    except Exception as error:  # a defect is what a drill is for; it belongs into the report like any other failure
        seen, outcome = f"{type(error).__name__}: {error}", "failed"
    return Step(exercise.name, exercise.done, seen, time.monotonic() - started, outcome)


def _not_run(exercise: Exercise) -> Step:
    return Step(exercise.name, exercise.done, "", 0.0, "not run")
