"""Planted bugs: for each, a copy of the package with one line changed, which the oracle checks must reject.

The suite is only worth what it catches. A mutant that survives means a check too weak; a `before` that is no longer in
the source exactly once means that the list in `mutants.py` or `mutants_losses.py` must be brought up to date.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.training.objectives.battery import CHECKS
from tests.training.objectives.mutant import Mutant
from tests.training.objectives.mutants import MUTANTS
from training import objectives

SOURCE = Path(objectives.__file__).parent


@pytest.fixture
def load_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Mutant | None], ModuleType]:
    """Import a copy of the package from source under another name, with a bug in it or without."""

    def load(mutant: Mutant | None) -> ModuleType:
        package = "objectives_under_mutation"
        (tmp_path / package).mkdir()
        for path in SOURCE.glob("*.py"):
            text = path.read_text(encoding="utf-8")
            if mutant is not None and path.stem == mutant.file:
                assert text.count(mutant.before) == 1, (
                    f"{mutant.what}: {text.count(mutant.before)} places in {path.name}"
                )
                text = text.replace(mutant.before, mutant.after)
            target = tmp_path / package / path.name
            target.write_text(text.replace("training.objectives", package), encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()
        try:
            return importlib.import_module(package)
        finally:
            for name in [name for name in sys.modules if name.partition(".")[0] == package]:
                del sys.modules[name]

    return load


def test_an_unchanged_copy_passes(load_copy: Callable[[Mutant | None], ModuleType]) -> None:
    copy = load_copy(None)
    assert copy.gae is not objectives.gae
    for check in CHECKS.values():
        check(copy)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}: {mutant.what}")
def test_the_check_catches(mutant: Mutant, load_copy: Callable[[Mutant | None], ModuleType]) -> None:
    copy = load_copy(mutant)
    with pytest.raises(AssertionError):
        CHECKS[mutant.check](copy)


def test_every_check_catches_something() -> None:
    assert {mutant.check for mutant in MUTANTS} == set(CHECKS)
