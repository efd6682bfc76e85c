"""`nightjar retention`: a plan to read, and the same carried out; never while a night is at work."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flows.registry_commands import retain_versions
from tasks.journal import Journal
from tasks.locks import held_lock
from tasks.night_lock import LOCK
from tasks.promotion import promote
from tasks.registry import CHALLENGER, CHAMPION, ModelRegistry, Version
from tasks.registry_errors import LockHeld, RegistryError
from tasks.retention import retain
from tasks.rollback import rollback
from tasks.site import Site
from tests.stored_nights import keep_undecided

Register = Callable[..., Version]


def numbers(site: Site) -> list[str]:
    return [version.number for version in site.registry.versions()]


@pytest.fixture
def known(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A home whose one chain has this site, keeping the newest one."""
    config = site.config.model_copy(update={"retention_keep": 1})
    monkeypatch.setattr(
        "flows.registry_commands.site_of", lambda home, chain, model: Site.open(site.home, config)
    )
    return site


def test_the_plan_is_shown_and_carried_out_only_when_asked(known: Site, register: Register) -> None:
    one, two, three, four = (register(seed).number for seed in (1, 2, 3, 4))
    promote(known, two, judged_against=None)

    told = retain_versions(known.home, apply=False)
    assert told.splitlines() == [
        "version 1, 3 of nightjar-policy would be deleted",
        "version 2 stays: alias champion",
        "version 4 stays: alias challenger",
        "nothing was changed: --apply deletes them; the newest 1 stay in any case (registry.retention_keep, or --keep)",
    ]
    assert numbers(known) == [one, two, three, four]

    told = retain_versions(known.home, apply=True)
    assert told.splitlines()[0] == "version 1, 3 of nightjar-policy was deleted"
    assert "mlflow gc" in told
    assert numbers(known) == [two, four]
    assert "no version of nightjar-policy is old enough" in retain_versions(known.home, apply=True)
    assert retain_versions(known.home, apply=False, keep=0).startswith("no version")


def test_not_while_a_night_is_at_work(known: Site, register: Register) -> None:
    register(1)
    register(2)
    with held_lock(known.home / LOCK, "a night of q"), pytest.raises(LockHeld, match="held by a night of q"):
        retain_versions(known.home, apply=True)
    assert numbers(known) == ["1", "2"]
    assert "would be deleted" in retain_versions(known.home, apply=False), "looking is free"


def test_what_a_rollback_may_be_told_to_return_to_stays(site: Site, register: Register) -> None:
    one, two, three, four = (register(seed).number for seed in (1, 2, 3, 4))
    for before, version in ((None, one), (one, two), (two, three)):
        promote(site, version, judged_against=before)
    rollback(site, why="both ramble", to=one)
    assert site.journal.champions(site.model) == (one,)
    site.registry.delete_alias(CHALLENGER)
    assert retain(site, keep=0).delete == (three, four)
    assert rollback(site, why="that one was sound", to=two).restored == two


def test_a_version_that_waits_for_a_person_stays(site: Site, register: Register) -> None:
    waiting, later = register(1, "a-0001").number, register(2, "b-0001").number
    promote(site, later, judged_against=None)
    site.registry.delete_alias(CHALLENGER)
    keep_undecided(site.home, "a-0001", 1, waiting)
    decided = retain(site, keep=0)
    assert (decided.delete, decided.protected[waiting]) == ((), "night a-0001 waits for a person's answer")


def test_a_deletion_is_announced_before_it_is_done(
    site: Site, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that is gone without a line would look lost, and stop every night."""
    register(1)
    promote(site, register(2).number, judged_against=None)

    def refuse(registry: ModelRegistry, version: Version) -> None:
        assert Journal(site.home).standing(site.model).retired == {version.number}
        raise RegistryError("the store is read-only")

    with monkeypatch.context() as patch:
        patch.setattr(ModelRegistry, "delete_version", refuse)
        with pytest.raises(RegistryError):
            retain(site, keep=0)
    assert retain(site, keep=0).delete == ("1",)
    assert (numbers(site), site.registry.alias(CHAMPION)) == (["2"], "2")
