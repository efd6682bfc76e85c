"""The place of a soak: made once, and remembered between sittings, so that many nights need not be run in one go."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from tiny_model import write_tiny_model

if TYPE_CHECKING:
    from tests.faults.soak import Soak

FOLDER = Path(__file__).resolve().parent
FAKES = (FOLDER.parent / "flows/fakes", FOLDER / "fakes")
_MEMORY = "soak.json"
_SETS = ("known", "spoilt", "taken_down", "torn")
_PLAIN = ("typical_seconds", "champion", "ended_badly")


def make_home(folder: Path) -> tuple[Path, Path]:
    """A home and the config of its nights below `folder`; what is there already is kept."""
    from tests.faults.short_nights import SHORT
    from tests.flows.nights import CONFIG

    home, config, model = folder / "home", folder / "soak.yaml", folder / "model"
    home.mkdir(parents=True, exist_ok=True)
    (folder / "source").mkdir(exist_ok=True)
    if not config.exists():
        write_tiny_model(model)
    os.environ |= {
        "NIGHTJAR_FAKE_MODEL": str(model), "PYTHONPATH": os.pathsep.join(map(str, FAKES)), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    data = {name: value for name, value in SHORT["data"].items() if name != "quickstart"}
    content = SHORT | {
        "name": "soak", "data": data | {"source": str(folder / "source")},
        "models": CONFIG["models"] | {"base": str(model)},
        "runtime": SHORT["runtime"] | {"home": str(home)},
    }  # fmt: skip
    config.write_text(yaml.safe_dump(content), encoding="utf-8")
    return home, config


def remember(soak: Soak, under_way: str | None) -> None:
    """Write down everything that the soak knows. `under_way`: the fault of the night that begins; null: none does."""
    counts = {name: dict(v) if isinstance(v, Counter) else v for name, v in vars(soak.counts).items()}
    content = {name: getattr(soak, name) for name in _PLAIN} | {name: sorted(getattr(soak, name)) for name in _SETS}
    content |= {"counts": counts, "draws": soak.draws.getstate(), "under_way": under_way}
    file = soak.home.parent / _MEMORY
    whole = file.with_suffix(".tmp")
    whole.write_text(json.dumps(content), encoding="utf-8")
    os.replace(whole, file)


def recall(soak: Soak) -> str | None:
    """Take up where an earlier sitting ended. Returns the fault of the night in which it was halted, if it was."""
    file = soak.home.parent / _MEMORY
    if not file.exists():
        return None
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    for name in _PLAIN:
        setattr(soak, name, content[name])
    for name in _SETS:
        setattr(soak, name, set(content[name]))
    for name, value in content["counts"].items():
        setattr(soak.counts, name, Counter(value) if isinstance(value, dict) else value)
    version, numbers, gauss = content["draws"]
    soak.draws.setstate((version, tuple(numbers), gauss))
    return content["under_way"]
