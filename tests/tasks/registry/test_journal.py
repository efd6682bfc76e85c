"""What the journal says of champions, of what is banned, and of what is unfinished."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.journal import Entry, Journal, _add_up, new_act
from tasks.registry_errors import JournalError

MODEL = "m"


def promoted(previous: str | None, candidate: str, digest: str | None = None, forced: bool = False) -> list[Entry]:
    act = new_act()
    fields = {"previous": previous, "candidate": candidate, "digest": digest, "forced": forced}
    return [Entry("pending", MODEL, act, **fields), Entry("verified", MODEL, act, **fields)]


def rolled_back(taken_down: str, restored: str, digest: str | None = None) -> list[Entry]:
    act = new_act()
    fields = {"taken_down": taken_down, "restored": restored, "digest": digest}
    return [Entry("rollback_pending", MODEL, act, **fields), Entry("rolled_back", MODEL, act, **fields)]


def written(home: Path, *acts: list[Entry]) -> Journal:
    journal = Journal(home)
    for act in acts:
        for entry in act:
            journal.write(entry)
    return journal


def test_a_damaged_entry_is_named(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_text('{"seq": 1, "model": "m"}\n')
    with pytest.raises(JournalError, match="entry 1 is damaged"):
        Journal(tmp_path).champions(MODEL)


def test_an_empty_journal_knows_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.champions(MODEL) == ()
    assert journal.previous_champion(MODEL) is None
    assert journal.unfinished() == []


def test_entries_come_back_as_they_were_written(tmp_path: Path) -> None:
    entry = Entry("pending", MODEL, "act", previous="3", candidate="4", night="n", digest="d", why="w", forced=True)
    back = Journal(tmp_path).write(entry)
    assert (back.seq, bool(back.time)) == (1, True)
    assert Journal(tmp_path).entries(MODEL) == [back]
    assert Journal(tmp_path).entries("another") == []


def test_previous_is_whom_the_champion_replaced_not_the_number_below(tmp_path: Path) -> None:
    journal = written(tmp_path, promoted(None, "2"), promoted("2", "9"), promoted("9", "11"))
    assert journal.champions(MODEL) == ("2", "9", "11")
    assert journal.previous_champion(MODEL) == "9"


def test_after_the_alias_was_moved_back_by_hand_a_rollback_leads_further_back(tmp_path: Path) -> None:
    journal = written(tmp_path, promoted(None, "2"), promoted("2", "9"), promoted("9", "11"))
    assert journal.previous_champion(MODEL, current="9") == "2", "not forward, to what it was moved away from"
    assert journal.previous_champion(MODEL, current="2") is None
    assert journal.previous_champion(MODEL, current="4") == "11", "one that the journal has never seen"


def test_weights_that_were_rolled_back_are_not_returned_to_under_another_number(tmp_path: Path) -> None:
    promotions = (promoted(None, "1", "good"), promoted("1", "2", "bad"), promoted("2", "3", "sound"))
    journal = written(tmp_path, *promotions, rolled_back("4", "3", "bad"))
    assert journal.champions(MODEL) == ("1", "2", "3")
    assert journal.previous_champion(MODEL) == "1"


def test_a_champion_made_by_hand_is_remembered_as_previous(tmp_path: Path) -> None:
    journal = written(tmp_path, promoted(None, "1"), promoted("5", "6"))
    assert journal.previous_champion(MODEL) == "5"


def test_rollback_leads_further_back_the_next_time(tmp_path: Path) -> None:
    promotions = (promoted(None, "1"), promoted("1", "2"), promoted("2", "3"))
    journal = written(tmp_path, *promotions, rolled_back("3", "2", "dd"))
    assert journal.champions(MODEL) == ("1", "2")
    assert journal.previous_champion(MODEL) == "1"
    assert journal.banned_versions(MODEL) == {"3": "dd"}
    assert journal.is_banned(MODEL, "3", None)
    assert journal.is_banned(MODEL, "8", "dd")
    assert not journal.is_banned(MODEL, "8", None)


def test_force_lifts_the_ban_of_the_same_weights(tmp_path: Path) -> None:
    journal = written(tmp_path, promoted(None, "1"), promoted("1", "2", "dd"), rolled_back("2", "1", "dd"))
    for entry in promoted("1", "4", "dd", forced=True):
        journal.write(entry)
    assert journal.banned_versions(MODEL) == {}
    assert journal.champions(MODEL) == ("1", "4")


def test_unfinished_until_closed_and_protected_meanwhile(tmp_path: Path) -> None:
    opening, closing = promoted("1", "2")
    journal = written(tmp_path, promoted(None, "1"), [opening])
    assert [entry.act for entry in journal.unfinished()] == [opening.act]
    assert journal.protected(MODEL) == {"1", "2"}
    journal.write(closing)
    assert journal.unfinished(MODEL) == []


def test_reverted_promotions_leave_no_trace_in_the_champions(tmp_path: Path) -> None:
    opening, _ = promoted("1", "2")
    closing = Entry("reverted", MODEL, opening.act, previous="1", candidate="2")
    journal = written(tmp_path, promoted(None, "1"), [opening, closing])
    assert journal.champions(MODEL) == ("1",)
    assert journal.banned_versions(MODEL) == {}


def test_torn_line_is_reported_and_not_a_record(tmp_path: Path) -> None:
    journal = written(tmp_path, promoted(None, "1"))
    with (tmp_path / "journal.jsonl").open("ab") as stream:
        stream.write(b'{"seq": 3, "event": "pending", "mod')
    assert journal.torn_lines() == 1
    assert journal.unfinished() == []
    for entry in promoted("1", "2"):
        journal.write(entry)
    assert journal.champions(MODEL) == ("1", "2")
    assert journal.torn_lines() == 1


@given(st.lists(st.sampled_from(["promote", "rollback", "kill"]), max_size=25))
def test_against_a_plain_stack(acts: list[str]) -> None:
    """A slow oracle: promote pushes, rollback pops and bans, a killed promotion does nothing."""
    entries: list[Entry] = []
    stack: list[str] = []
    banned: list[str] = []
    for number, act in enumerate(acts):
        top = stack[-1] if stack else None
        if act == "rollback":
            if len(stack) < 2:
                continue
            entries += rolled_back(stack[-1], stack[-2])
            banned.append(stack.pop())
        elif act == "promote":
            entries += promoted(top, str(number))
            stack.append(str(number))
        else:
            entries.append(promoted(top, str(number))[0])
    standing = _add_up(entries)
    assert standing.champions == stack
    assert list(standing.banned) == banned
    assert len(standing.open) == acts.count("kill")
