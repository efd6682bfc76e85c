"""Asking a version by its address: its own bytes, or none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from configs.errors import NightjarError
from tasks.asking import ask
from tasks.promotion import promote
from tasks.registry import Version
from tasks.registry_errors import RegistryError, StoredBytesDiffer
from tasks.site import Site

Register = Callable[..., Version]


def test_the_champion_and_a_number_answer(site: Site, register: Register) -> None:
    first = register(1)
    promote(site, first.number, judged_against=None)
    said = ask(site, f"models:/{site.model}@champion", "who are you?", 6)
    assert said
    assert ask(site, f"models:/{site.model}/{first.number}", "who are you?", 6) == said


def test_code_that_changed_after_the_upload_is_not_run(site: Site, register: Register) -> None:
    version = register(1)
    with site.stored(version) as folder:
        code = folder / "serving_model.py"
        code.write_text(code.read_text() + "\nraise SystemExit('run')\n")
    with pytest.raises(StoredBytesDiffer, match=code.name):
        ask(site, f"models:/{site.model}/{version.number}", "who are you?", 6)


@pytest.mark.parametrize(
    "address", ["team@champion", "models:/team", "models:/team/latest", "models:/a/b/3", "runs:/1/m"]
)
def test_what_is_no_address_is_refused(site: Site, address: str) -> None:
    with pytest.raises(NightjarError, match="models:/NAME@champion"):
        ask(site, address, "who are you?", 6)


def test_what_is_not_there_is_named(site: Site, register: Register) -> None:
    register(1)
    with pytest.raises(RegistryError, match="no version with the alias king"):
        ask(site, f"models:/{site.model}@king", "who are you?", 6)
    with pytest.raises(RegistryError):
        ask(site, f"models:/{site.model}/77", "who are you?", 6)
