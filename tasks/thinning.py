"""Which points of a long series are sent when only so many may be: evenly by step, always the last. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

Point = tuple[int, int, float]
"""(step, time in ms since 1970, value)"""


@dataclass
class SeriesState:
    """What is known of one metric between deliveries: how many were sent, the last step of them, and the newest point
    that was left out (sent at the end if nothing newer is)."""

    sent: int = 0
    last_step: int | None = None
    held: Point | None = None


def bucket_width(first_step: int, last_step: int, room: int) -> int:
    """Steps a bucket spans so that first..last touches at most `room` buckets (room >= 2)."""
    return max(1, math.ceil((last_step - first_step + 1) / (room - 1)))


def offer(series: SeriesState, point: Point, width: int, cap: int) -> Point | None:
    """The point, when it opens a new bucket and leaves room for the last one; otherwise it is held and None returned.

    Steps that were passed already (a stage that went back to its checkpoint runs them again) are left out.
    """
    step = point[0]
    if series.last_step is not None and step <= series.last_step:
        return None
    opens = series.last_step is None or step // width > series.last_step // width
    if not opens or series.sent >= cap - 1:
        series.held = point
        return None
    series.sent, series.last_step, series.held = series.sent + 1, step, None
    return point


def last_of(series: SeriesState) -> Point | None:
    """The held point, to be sent now that the series has ended; None when the newest point was sent."""
    held, series.held = series.held, None
    if held is None or (series.last_step is not None and held[0] <= series.last_step):
        return None
    series.sent, series.last_step = series.sent + 1, held[0]
    return held
