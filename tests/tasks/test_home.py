"""Where a home is: in words where the system cannot say."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.errors import NightjarError
from tasks.home import home_at, home_of


def test_a_working_directory_that_is_gone_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NIGHTJAR_HOME", raising=False)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(NightjarError, match=r"home \.nightjar cannot be found"):
        home_of()


def test_nobodys_tilde_is_said() -> None:
    with pytest.raises(NightjarError, match=r"home ~nobody-of-that-name/x cannot be found"):
        home_at("~nobody-of-that-name/x")
