"""What the pictures' script asks of the two servers: which version, which night before it, and where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from docs.night_lookup import Addresses, exports, last_registered, night_before, stack_addresses


def version_of(number: int, created: int, night: str | None) -> dict[str, Any]:
    tags = [{"key": "nightjar.night", "value": night}] if night else []
    return {"version": str(number), "creation_timestamp": str(created), "tags": tags}


def test_the_newest_version_of_a_night_by_time_not_by_order() -> None:
    """Versions of several models come in one answer, and one that somebody has registered by hand names no night."""
    versions = [version_of(2, 30, "a-0002"), version_of(9, 20, "b-0001"), version_of(3, 40, None)]
    found = last_registered(versions)
    assert found is not None
    assert found["version"] == "2"
    assert last_registered(versions[2:]) is None
    assert last_registered([]) is None


def test_the_night_before_began_last_of_those_that_began_earlier() -> None:
    nights = [{"run_id": f"r{start}", "start_time": start} for start in (9, 100, 50, 200)]
    assert night_before(nights, nights[1]) == "r50"
    assert night_before(nights, nights[0]) is None


def test_the_stack_says_its_addresses_itself_and_else_the_environment(tmp_path: Path) -> None:
    shell = {"MLFLOW_TRACKING_URI": "http://m:1/", "PREFECT_API_URL": "http://p:2/api/"}
    assert stack_addresses(tmp_path, shell) == Addresses("http://m:1", "http://p:2")
    (tmp_path / "stack").mkdir()
    lines = "export PREFECT_API_URL=http://127.0.0.1:3/api\nexport MLFLOW_TRACKING_URI=http://127.0.0.1:4\n"
    (tmp_path / "stack" / "env").write_text(lines)
    assert stack_addresses(tmp_path, shell) == Addresses("http://127.0.0.1:4", "http://127.0.0.1:3")


def test_no_address_is_said_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="PREFECT_API_URL not set: `make stack`"):
        stack_addresses(tmp_path, {"MLFLOW_TRACKING_URI": "http://m:1"})


def test_only_exports_are_read() -> None:
    assert exports("# note\nexport A=b=c\nD=e\n\n") == {"A": "b=c"}
