"""What the folder of a healthy store holds."""

from __future__ import annotations

import json


def assert_tidy(path):
    """Nothing but the last two generations and the segments that they name."""
    manifests = sorted(file.name for file in path.iterdir() if file.is_file() and file.name != "writer.lock")
    assert all(name.startswith("manifest-") for name in manifests)
    assert len(manifests) <= 2
    named = set()
    for name in manifests:
        named |= {entry["name"] for entry in json.loads((path / name).read_text())["body"]["segments"]}
    assert {file.name for file in (path / "segments").iterdir()} == named
    assert not (path / "quarantine").exists()
