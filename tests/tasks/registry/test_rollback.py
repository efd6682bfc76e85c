"""Rollback: one idempotent act, refused where it would make things worse."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tasks.promotion import Force, promote
from tasks.reconcile import reconcile
from tasks.registry import CHALLENGER, CHAMPION, PREVIOUS, Version
from tasks.registry_errors import JournalContradicted, RollbackRefused
from tasks.rollback import rollback
from tasks.site import Site
from tasks.version_tags import ROLLBACK_REASON, ROLLED_BACK_AT

Register = Callable[..., Version]


def promote_all(site: Site, register: Register, *seeds: int) -> list[str]:
    """Register and promote one after the other."""
    numbers: list[str] = []
    for seed in seeds:
        numbers.append(register(seed).number)
        promote(site, numbers[-1], judged_against=numbers[-2] if len(numbers) > 1 else None)
    return numbers


def test_nothing_to_roll_back(site: Site, register: Register) -> None:
    register(1)
    with pytest.raises(RollbackRefused, match="no champion"):
        rollback(site, why="test")


def test_no_earlier_version_is_refused_and_the_champion_stays(site: Site, register: Register) -> None:
    (first,) = promote_all(site, register, 1)
    with pytest.raises(RollbackRefused, match="no earlier champion"):
        rollback(site, why="test")
    assert site.registry.alias(CHAMPION) == first
    assert site.journal.unfinished() == []


def test_goes_back_once_however_often_it_is_asked(site: Site, register: Register) -> None:
    first, second, third = promote_all(site, register, 1, 2, 3)
    site.registry.describe(third, "version 3 was promoted by night n-0003")
    done = rollback(site, why="it rambles", by="Ada")
    told = site.registry.description(third)
    assert told.startswith("**rolled back 20")
    assert told.endswith("Z: it rambles**\n\nversion 3 was promoted by night n-0003")
    assert (done.changed, done.taken_down, done.restored) == (True, third, second)
    assert site.registry.alias(CHAMPION) == second
    assert site.registry.alias(PREVIOUS) == first
    assert site.registry.version(third).tags[ROLLBACK_REASON] == "it rambles"
    lines = len(site.journal.entries())

    again = rollback(site, why="it rambles", by="Ada")

    assert not again.changed
    assert "already" in again.sentence
    assert site.registry.alias(CHAMPION) == second
    assert len(site.journal.entries()) == lines


def test_an_event_about_another_version_changes_nothing(site: Site, register: Register) -> None:
    _, second, third = promote_all(site, register, 1, 2, 3)
    assert not rollback(site, why="late event", away_from=second).changed
    assert site.registry.alias(CHAMPION) == third
    assert rollback(site, why="event", away_from=third).changed
    assert not rollback(site, why="event", away_from=third).changed
    assert site.registry.alias(CHAMPION) == second


def test_named_targets(site: Site, register: Register) -> None:
    first, second, third = promote_all(site, register, 1, 2, 3)
    never = register(4).number
    with pytest.raises(RollbackRefused, match="never champion"):
        rollback(site, why="test", to=never)
    with pytest.raises(RollbackRefused, match="no version 99"):
        rollback(site, why="test", to="99")
    assert rollback(site, why="test", to=first).restored == first
    assert not rollback(site, why="test", to=first).changed
    assert site.registry.alias(PREVIOUS) is None
    with pytest.raises(RollbackRefused, match="itself rolled back"):
        rollback(site, why="test", to=third)
    assert rollback(site, why="up again to what was only passed", to=second).restored == second


@pytest.mark.parametrize("written", ["0{}", " {}", "{} "])
def test_a_number_that_only_mlflow_understands_is_taken_as_the_registry_writes_it(
    site: Site, register: Register, written: str
) -> None:
    first, _, third = promote_all(site, register, 1, 2, 3)
    assert not rollback(site, why="test", to=written.format(third)).changed
    assert rollback(site, why="test", to=written.format(first)).restored == first
    assert site.journal.unfinished() == []
    assert site.journal.champions(site.model) == (first,)


def test_a_deleted_alias_is_put_back_by_a_person(site: Site, register: Register) -> None:
    first, second = promote_all(site, register, 1, 2)
    site.registry.delete_alias(CHAMPION)
    with pytest.raises(JournalContradicted, match=rf"(?s)alias champion .* is gone.*promote {second} --force"):
        rollback(site, why="test")
    promote(site, second, judged_against=None, force=Force("Ada", "put back"))
    assert rollback(site, why="test").restored == first


def test_a_broken_target_is_refused_and_the_champion_stays(site: Site, register: Register) -> None:
    first, second = promote_all(site, register, 1, 2)
    with site.stored(site.registry.version(first)) as folder:
        next(folder.rglob("tokenizer.json")).unlink()
    with pytest.raises(RollbackRefused, match=r"tokenizer\.json is missing"):
        rollback(site, why="test")
    assert site.registry.alias(CHAMPION) == second
    assert site.journal.unfinished() == []


def test_a_reason_is_required(site: Site) -> None:
    with pytest.raises(RollbackRefused, match="reason"):
        rollback(site, why=" ")


def test_a_champion_made_by_hand_rolls_back_to_the_journals_own(site: Site, register: Register) -> None:
    (first,) = promote_all(site, register, 1)
    by_hand = register(2).number
    site.registry.set_alias(CHAMPION, by_hand)
    assert rollback(site, why="nobody judged it").restored == first


@pytest.mark.parametrize("lines", [("rollback_pending",), ("rollback_pending", "rolled_back")])
def test_half_done_rollback_is_completed_and_told(site: Site, register: Register, lines: tuple[str, ...]) -> None:
    """Killed before the alias had moved, and right after the act was closed."""
    first, second = promote_all(site, register, 1, 2)
    site.registry.describe(second, "version 2 was promoted by night n-0002")
    act = {"model": site.model, "act": "dead", "taken_down": second, "restored": first, "why": "it rambles"}
    for event in lines:
        site.journal.log.append({"event": event, **act, "time": "2025-06-01T04:00:00Z"})
    if len(lines) == 2:
        site.registry.set_alias(CHAMPION, first)
    site.registry.set_alias(CHALLENGER, second)

    done = reconcile(site)

    assert ["completed" in sentence for sentence in done.settled] == [True] * (2 - len(lines))
    assert site.registry.alias(CHAMPION) == first
    assert site.registry.alias(CHALLENGER) is None
    assert list(site.journal.banned_versions(site.model)) == [second]
    closed = site.journal.entries(site.model)[-1]
    tags, told = site.registry.version(second).tags, site.registry.description(second)
    assert (tags[ROLLBACK_REASON], tags[ROLLED_BACK_AT]) == ("it rambles", closed.time)
    assert told == f"**rolled back {closed.time}: it rambles**\n\nversion 2 was promoted by night n-0002"

    assert reconcile(site).nothing_to_do
    site.registry.client.delete_model_version_tag(site.model, second, ROLLED_BACK_AT)
    reconcile(site)
    assert site.registry.version(second).tags[ROLLED_BACK_AT] == closed.time
    assert site.registry.description(second) == told, "killed between the text and the tags: nothing is told twice"


def test_what_a_person_put_back_is_not_marked_again(site: Site, register: Register) -> None:
    _, second = promote_all(site, register, 1, 2)
    rollback(site, why="it rambles")
    promote(site, second, judged_against="1", force=Force("Ada", "it does not"))
    site.registry.client.delete_model_version_tag(site.model, second, ROLLED_BACK_AT)
    reconcile(site)
    assert ROLLED_BACK_AT not in site.registry.version(second).tags
    rollback(site, why="it does")
    assert site.registry.version(second).tags[ROLLBACK_REASON] == "it does"
    assert site.registry.description(second).startswith("**rolled back 20")


def test_asked_again_after_a_promotion_that_was_reverted_it_still_changes_nothing(
    site: Site, register: Register
) -> None:
    _, second, third = promote_all(site, register, 1, 2, 3)
    assert rollback(site, why="it rambles").restored == second
    line = {"event": "pending", "model": site.model, "act": "dead", "previous": second, "candidate": third}
    site.journal.log.append(line)
    assert "promotion of version" in reconcile(site).settled[0]

    assert not rollback(site, why="it rambles").changed
    assert site.registry.alias(CHAMPION) == second
    assert list(site.journal.banned_versions(site.model)) == [third]
