"""A journal that was cut or lost, a database that was lost or replaced: found, nothing moves, and the way out works."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.schema.registry import RegistryConfig
from tasks.admission import check_registry
from tasks.adoption import adopt
from tasks.agreement import Agreement, compare, require_kept_database, settled
from tasks.champion import freeze_champion
from tasks.journal import Entry, new_act
from tasks.promotion import Force, promote
from tasks.reconcile import reconcile
from tasks.registry import CHAMPION, PREVIOUS, Version
from tasks.registry_errors import JournalContradicted, JournalError, PromotionError
from tasks.retention import retain
from tasks.rollback import rollback
from tasks.site import Site
from tasks.version_tags import DIGEST, FORCED, NIGHT, PROMOTED_AT, ROLLBACK_REASON, ROLLED_BACK_AT
from tests.stored_nights import run_night

AGREED = Agreement()


@pytest.fixture
def plain(home: Path) -> Site:
    """A site without a serving child: versions here have no bytes."""
    return Site.open(home, RegistryConfig(model="chat-policy", lock_wait_seconds=0.5))


def made_champion(site: Site, night: str = "", previous: str | None = None) -> str:
    """A version with the journal's lines, the alias and the tags that a promotion leaves, in its order."""
    site.registry.ensure()
    tags = {DIGEST: f"sha-{time.monotonic_ns()}"} | ({NIGHT: night} if night else {})
    number = str(site.registry.client.create_model_version(site.model, "nowhere", tags=tags).version)
    entry = Entry("pending", site.model, new_act(), previous=previous, candidate=number, digest=tags[DIGEST])
    site.journal.write(entry)
    site.registry.set_alias(CHAMPION, number)
    site.journal.write(Entry("verified", site.model, entry.act, previous, number, digest=tags[DIGEST]))
    site.registry.tag(number, {PROMOTED_AT: f"2025-06-{int(number):02d}T04:00:00Z"})
    return number


def taken_down(site: Site, number: str, restored: str) -> None:
    act = new_act()
    for event in ("rollback_pending", "rolled_back"):
        site.journal.write(Entry(event, site.model, act, taken_down=number, restored=restored))
    site.registry.set_alias(CHAMPION, restored)
    site.registry.tag(number, {ROLLBACK_REASON: "it rambles", ROLLED_BACK_AT: "2025-06-03T04:00:00Z"})


def keep_lines(site: Site, count: int) -> None:
    lines = site.journal.log.path.read_bytes().splitlines(keepends=True)
    site.journal.log.path.write_bytes(b"".join(lines[:count]))


def test_every_cut_of_the_journal_is_found_and_moves_nobody(plain: Site) -> None:
    first = made_champion(plain)
    second = made_champion(plain, previous=first)
    taken_down(plain, second, first)
    whole = plain.journal.log.path.read_bytes()
    assert compare(plain) == AGREED
    assert whole.count(b"\n") == 6
    for kept in range(6):
        plain.journal.log.path.write_bytes(whole)
        keep_lines(plain, kept)
        assert compare(plain).lost, f"{kept} lines kept"
        done = reconcile(plain)
        assert done.contradicted
        assert "was lost or cut" in done.problems[0]
        assert plain.registry.alias(CHAMPION) == first
        assert plain.journal.log.path.read_bytes().count(b"\n") == kept, "nothing is settled on half a journal"
    plain.journal.log.path.unlink()
    assert "version 1, 2 of chat-policy was promoted" in compare(plain).lost[0]


def test_a_promotion_that_only_lost_its_last_line_is_not_reverted(plain: Site) -> None:
    first = made_champion(plain)
    second = made_champion(plain, previous=first)
    keep_lines(plain, 3)
    assert [entry.candidate for entry in plain.journal.unfinished()] == [second], "it looks like a killed promotion"
    reconcile(plain)
    assert plain.registry.alias(CHAMPION) == second


def test_nothing_is_promoted_rolled_back_or_deleted_on_a_lost_journal(plain: Site) -> None:
    first = made_champion(plain)
    made_champion(plain, previous=first)
    plain.journal.log.path.unlink()
    acts: list[Callable[[], object]] = [
        lambda: promote(plain, first, judged_against="2"),
        lambda: promote(plain, first, judged_against="2", force=Force("ada", "now")),
        lambda: rollback(plain, why="test"),
        lambda: rollback(plain, why="test", to=first),
        lambda: retain(plain, keep=0),
        lambda: settled(plain),
    ]
    for act in acts:
        with pytest.raises(JournalContradicted, match=r"(?s)lost or cut.*reconcile --adopt --why"):
            act()
    assert plain.registry.alias(CHAMPION) == "2"
    assert len(plain.registry.versions()) == 2
    assert not plain.journal.log.path.exists()


def test_a_champion_made_by_hand_is_told_and_stands(plain: Site) -> None:
    first = made_champion(plain)
    by_hand = str(plain.registry.client.create_model_version(plain.model, "nowhere").version)
    plain.registry.set_alias(CHAMPION, by_hand)
    found = compare(plain)
    assert found.lost == ()
    assert f"the journal knows version {first} of chat-policy as champion, the alias names version 2" in found.moved[0]
    done = reconcile(plain)
    assert (done.contradicted, done.problems, len(done.moved)) == (False, [], 1)
    plain.journal.log.path.unlink()
    plain.registry.client.delete_model_version_tag(plain.model, first, PROMOTED_AT)
    assert "promoted by hand, or the journal was lost" in compare(plain).moved[0]


def test_a_new_database_under_an_old_journal_is_found(plain: Site, empty_database: Path) -> None:
    made_champion(plain)
    shutil.copy(empty_database, plain.home / "mlflow.db")
    fresh = Site.open(plain.home, plain.config)
    assert "is champion by the journal, and MLflow at" in compare(fresh).lost[0]
    fresh.registry.ensure()
    fresh.registry.client.create_model_version(fresh.model, "nowhere", tags={DIGEST: "another"})
    assert "is not the one that the journal promoted" in compare(fresh).lost[0]


def test_nights_remember_versions_that_a_new_database_does_not_have(plain: Site) -> None:
    run_night(plain.home, "chat", when=1000.0)
    _note(plain, version="3", promoted=True)
    assert "night chat-0001 promoted version 3 of chat-policy" in compare(plain).lost[0]
    _note(plain, version="3", promoted=False)
    assert "night chat-0001 registered version 3" in compare(plain).moved[0], "told, and in nobody's way"
    run_night(plain.home, "chat", 2, when=2000.0, tracking_uri="http://127.0.0.1:9")
    assert compare(plain).moved, "what another server keeps says nothing of this one"


def test_a_lost_database_is_found_before_asking_makes_one(plain: Site) -> None:
    (plain.home / "mlflow.db").unlink()
    require_kept_database(plain)
    run_night(plain.home, "chat", when=1000.0)
    require_kept_database(plain)
    _note(plain, version="3")
    for lost in (lambda: None, (plain.home / "mlflow.db").touch):
        lost()
        with pytest.raises(JournalContradicted, match=r"missing or empty, and version 3 of night chat-0001"):
            require_kept_database(plain)
    assert not (plain.home / "mlflow.db").stat().st_size


def _note(site: Site, **fields: object) -> None:
    from tasks.night_state import NightBook

    book = NightBook(site.home)
    book.change(book.load("chat-0001"), **fields)


def test_adoption_makes_a_lost_journal_agree_and_keeps_bans(plain: Site) -> None:
    first = made_champion(plain)
    second = made_champion(plain, previous=first)
    third = made_champion(plain, previous=second)
    taken_down(plain, third, second)
    plain.journal.log.path.unlink()
    with pytest.raises(PromotionError, match="needs a reason"):
        adopt(plain, by="ada", why=" ")
    told = adopt(plain, by="ada", why="the disk died")
    assert "champion version 2; before it 1; banned 3 (ada: the disk died)" in told
    assert compare(plain) == AGREED
    assert plain.journal.champions(plain.model) == (first, second)
    assert list(plain.journal.banned_versions(plain.model)) == [third]
    assert plain.registry.alias(PREVIOUS) == first
    assert "nothing to adopt" in adopt(plain, by="ada", why="again")
    assert len(plain.journal.entries()) == 1
    assert reconcile(plain).nothing_to_do


@pytest.mark.parametrize("how", ["forced", "by hand"])
def test_adoption_takes_a_version_that_came_back_after_its_rollback(plain: Site, how: str) -> None:
    first = made_champion(plain)
    second = made_champion(plain, previous=first)
    taken_down(plain, second, first)
    plain.registry.set_alias(CHAMPION, second)
    if how == "forced":
        plain.registry.tag(second, {FORCED: "ada: it is good", PROMOTED_AT: "2025-06-04T04:00:00Z"})
    plain.journal.log.path.unlink()
    adopt(plain, by="ada", why="the disk died")
    assert compare(plain) == AGREED, "its tag still says that it was rolled back once"
    assert plain.journal.champions(plain.model) == (first, second)
    assert plain.journal.banned_versions(plain.model) == {}


def test_adoption_begins_anew_under_a_new_database(plain: Site, empty_database: Path) -> None:
    run_night(plain.home, "chat", when=1000.0)
    number = made_champion(plain, night="chat-0001")
    _note(plain, version=number, promoted=True)
    shutil.copy(empty_database, plain.home / "mlflow.db")
    fresh = Site.open(plain.home, plain.config)
    assert compare(fresh).lost
    assert "champion none" in adopt(fresh, by="ada", why="no backup")
    assert compare(fresh) == AGREED
    assert fresh.journal.champions(fresh.model) == ()
    made_champion(fresh)
    assert compare(fresh) == AGREED, "the number comes again, with other weights"


def test_a_deleted_alias_is_no_first_night(plain: Site, tmp_path: Path) -> None:
    first = made_champion(plain)
    second = made_champion(plain, previous=first)
    plain.registry.delete_alias(CHAMPION)
    gone = rf"(?s)alias champion of {plain.model} is gone.*version {second}.*promote {second} --force"
    for ask in (lambda: check_registry(plain), lambda: freeze_champion(plain, tmp_path)):
        with pytest.raises(JournalContradicted, match=gone):
            ask()
    assert f"champion none; before it {second}, {first}" in adopt(plain, by="ada", why="on purpose")
    with pytest.raises(JournalContradicted, match=gone):
        check_registry(plain)


def test_adoption_clears_what_looked_unfinished(plain: Site) -> None:
    first = made_champion(plain)
    made_champion(plain, previous=first)
    keep_lines(plain, 3)
    adopt(plain, by="ada", why="cut")
    assert plain.journal.unfinished() == []
    assert plain.journal.champions(plain.model) == (first, "2")


def test_a_damaged_line_is_named_and_nothing_is_adopted_over_it(plain: Site) -> None:
    made_champion(plain)
    file = plain.journal.log.path
    file.write_bytes(b"#!?\n" + file.read_bytes())
    with pytest.raises(JournalError, match=r"(?s)journal\.jsonl: line 1 is not JSON.*move it aside"):
        adopt(plain, by="ada", why="damaged")
    file.rename(file.with_suffix(".damaged"))
    adopt(plain, by="ada", why="damaged")
    assert compare(plain) == AGREED


def test_after_an_adoption_real_versions_are_promoted_and_rolled_back(
    site: Site, register: Callable[..., Version]
) -> None:
    first, second, third = register(1), register(2), register(3)
    promote(site, first.number, judged_against=None)
    promote(site, second.number, judged_against=first.number)
    site.journal.log.path.write_bytes(b"")
    with pytest.raises(JournalContradicted):
        promote(site, third.number, judged_against=second.number)
    adopt(site, by="ada", why="emptied")
    promote(site, third.number, judged_against=second.number)
    assert rollback(site, why="worse").restored == second.number
    assert rollback(site, why="worse still", to=first.number).restored == first.number
