"""What the guards of a training stage saw and did, as lines of the night's page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from training.contract import METRICS
from training.recorder import read_lines


@dataclass(frozen=True)
class GuardLine:
    """One firing of a rule, or one rollback: optimiser step, rule, what was done, and a sentence for a person."""

    step: int
    rule: str
    action: str
    sentence: str


def guard_lines(directory: Path) -> tuple[GuardLine, ...]:
    """Every firing and rollback told in the metrics file of a stage, in order; none where there is no such file.

    Read from the events, not from the stage's result: a stage that its guards have ended has no result.
    """
    lines = []
    for event in read_lines(directory / METRICS):
        if event.get("event") == "guard":
            lines.append(GuardLine(event["step"], event["rule"], event["action"], event["sentence"]))
        elif event.get("event") == "rollback":
            told = f"the state of step {event['to_step']} is back, the rest of round {event['round']} is given up"
            lines.append(GuardLine(event["step"], event["rule"], "rolled back", told))
    return tuple(lines)
