"""What a night notes of its promotion when it is continued after somebody has taken the version down."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tasks import champion_change
from tasks.champion_change import promote_version
from tasks.registry_errors import BannedVersion, PromotionRaced, TrackingUnavailable


class Night:
    """A night that was killed after its promotion was noted."""

    def __init__(self) -> None:
        self.site = None
        self.state = SimpleNamespace(night="q-0002", champion=None, promoted=True)
        self.thawed = False

    def note(self, **fields: Any) -> None:
        self.state.__dict__.update(fields)

    def thaw(self) -> None:
        self.thawed = True


@pytest.mark.parametrize(
    ("error", "promoted", "thawed"),
    [
        pytest.param(BannedVersion("was rolled back before"), False, False, id="rolled-back"),
        pytest.param(PromotionRaced("another is champion"), False, True, id="overtaken"),
        pytest.param(TrackingUnavailable("no answer"), True, False, id="not-known"),
    ],
)
def test_a_promotion_of_before_the_kill_is_not_told_when_it_was_taken_back(
    monkeypatch: pytest.MonkeyPatch, error: Exception, promoted: bool, thawed: bool
) -> None:
    def refuse(*given: object, **named: object) -> None:
        raise error

    monkeypatch.setattr(champion_change, "promote", refuse)
    night = Night()
    with pytest.raises(type(error)):
        promote_version(night, "2", None)  # type: ignore[arg-type]
    assert (night.state.promoted, night.thawed) == (promoted, thawed)
