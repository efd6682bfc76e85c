"""What `status` and `gate explain` say of a home in which something is damaged or lost; and that they make nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from configs.errors import NightjarError
from flows.exit_codes import BUSY, DONE, USER
from flows.registry_commands import answer, explain_gate, reconcile_now, roll_back
from flows.status_view import status_view
from flows.ui_command import serve_ui
from tasks.journal import Entry, new_act
from tasks.last_config import site_of
from tasks.night_lock import only_night
from tasks.night_state import NightBook
from tasks.registry import CHAMPION
from tasks.version_tags import DIGEST, NIGHT, PROMOTED_AT
from tests.stored_nights import run_night


@pytest.fixture
def home(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nights, the second of them promoted by the book."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for index in (1, 2):
        run_night(tmp_path, "chat", index, when=1000.0 * index)
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    site = site_of(tmp_path)
    site.registry.ensure()
    tags = {NIGHT: "chat-0002", DIGEST: "d"}
    site.registry.client.create_model_version(site.model, "nowhere", tags=tags)
    act = new_act()
    for event in ("pending", "verified"):
        site.journal.write(Entry(event, site.model, act, candidate="1", digest="d"))
    site.registry.put_alias(CHAMPION, "1")
    site.registry.tag("1", {PROMOTED_AT: "2025-06-01T04:00:00Z"})
    book = NightBook(tmp_path)
    book.change(book.load("chat-0002"), version="1", promoted=True, verdict="PASS", ended=2100.0)
    return tmp_path


def shown(home: Path) -> str:
    console = Console(width=400)
    with console.capture() as capture:
        console.print(status_view(home, 10))
    return capture.get()


def change(home: Path, night: str, /, **fields: Any) -> Path:
    file = home / "runs" / night / "night.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return file


def test_a_sound_home_has_no_open_problems(home: Path) -> None:
    told = shown(home)
    assert "chat-policy: champion version 1, previous none" in told
    assert "no open problems" in told


@pytest.mark.parametrize(
    "odd",
    [
        {"started": 1e300}, {"started": float("inf")}, {"started": float("nan")}, {"started": -1e18},
        {"ended": 1e300}, {"ended": True, "started": "soon"}, {"index": 1e300}, {"night": "chat-0002"},
        {"stages": {"ppo": {"how": "done", "seconds": float("nan")}}}, {"reason": "\ud800"}, {"version": 10**40},
        {"acts": []}, {"status": "[/]"},
    ],
    ids=str,
)  # fmt: skip
def test_odd_values_in_a_record_are_a_problem_of_that_night_alone(home: Path, odd: dict[str, Any]) -> None:
    file = change(home, "chat-0001", **odd)
    told = shown(home)
    assert f"open {file}: " in told
    assert "what to do" in told
    assert "1 (promoted)" in told, "the other night is shown"


@pytest.mark.parametrize(
    "content", ["[" * 200_000, "1" * 5000, "[]", "null", "{", "\x00", '{"started": 1}'], ids=range(7)
)
def test_any_content_of_a_record_is_a_problem_of_that_night_alone(home: Path, content: str) -> None:
    file = home / "runs/chat-0001/night.json"
    file.write_text(content)
    assert f"open {file}: " in shown(home)
    file.unlink()
    assert f"open {file}: missing" in shown(home)
    file.mkdir()
    assert f"open {file}: cannot be read" in shown(home)
    assert NightBook(home).next_index("chat") == 3


def test_text_in_a_record_is_shown_as_text(home: Path) -> None:
    change(home, "chat-0001", verdict="[/]", version="[red]7", reason="[/bold]")
    told = shown(home)
    assert all(text in told for text in ("[/]", "[red]7", "[/bold]"))


def test_a_damaged_journal_hides_nothing_and_is_named_by_line(home: Path) -> None:
    file = home / "journal.jsonl"
    lines = file.read_text().splitlines()
    for damaged, said in (
        ("#!?", "line 2 is not JSON"),
        ('{"seq": 9}', "line 2 does not carry seq 2"),
        ('{"seq": 2, "event": "pending", "model": "chat-policy", "act": {}}', "line 2: entry 2 is damaged: act"),
        ('{"seq": 2, "event": "sung", "model": "chat-policy", "act": "a"}', "line 2: entry 2 is damaged: event"),
        ("[" * 200_000, "line 2 is not JSON"),
    ):
        file.write_text(f"{lines[0]}\n{damaged}\n")
        told = shown(home)
        assert f"open {file}: {said}" in told
        assert "restore the file from a backup" in told
        assert "chat-0001" in told
        assert "champion version 1" in told, "the registry is asked all the same"


def test_a_lost_or_cut_journal_is_an_open_problem(home: Path) -> None:
    file = home / "journal.jsonl"
    whole = file.read_bytes()
    for left in (b"", whole.splitlines(keepends=True)[0]):
        file.write_bytes(left)
        told = shown(home)
        assert "was promoted, as its tag says" in told
        assert "nightjar reconcile --adopt --why" in told
        assert "no open problems" not in told
    file.unlink()
    assert "was promoted, as its tag says" in shown(home)
    assert not file.exists()


def test_a_lost_database_is_an_open_problem_and_is_not_made_anew(home: Path) -> None:
    file = home / "mlflow.db"
    for lost in (file.unlink, file.touch):
        lost()
        before = sorted(home.rglob("*"))
        told = shown(home)
        assert "missing or empty, and version 1 of night chat-0002 was registered there" in told
        assert "champion version 1, as the journal says" in told
        commands = [
            lambda: answer(home, None, "well?", 8),
            lambda: answer(home, "models:/chat-policy/1", "well?", 8),
            lambda: serve_ui(home, 5999),
            lambda: roll_back(home, None, "curt"),
            lambda: reconcile_now(home),
        ]
        for command in commands:
            with pytest.raises(NightjarError, match="missing or empty"):
                command()
        assert sorted(home.rglob("*")) == before
        assert not (file.exists() and file.stat().st_size)


def test_a_database_made_anew_is_an_open_problem(home: Path, empty_database: Path) -> None:
    shutil.copy(empty_database, home / "mlflow.db")
    assert "is champion by the journal, and MLflow at" in shown(home)


def test_unreadable_configs_leave_the_nights_on_the_page(home: Path) -> None:
    for config in home.glob("runs/*/config.json"):
        config.write_text("{")
    told = shown(home)
    assert "chat-0002" in told
    assert "of its 2 nights can be read" in told


def test_reconcile_says_a_contradiction_and_adopts_when_told_to(home: Path) -> None:
    (home / "journal.jsonl").unlink()
    told, code = reconcile_now(home)
    assert code == USER
    assert "was promoted, as its tag says" in told
    with pytest.raises(NightjarError, match="--adopt needs a reason"):
        reconcile_now(home, adopt="")
    told, code = reconcile_now(home, adopt="the disk died")
    assert code == DONE
    assert "champion version 1" in told
    assert "no open problems" in shown(home)


def test_reconcile_says_that_a_promotion_is_at_work_and_needs_no_person_for_it(home: Path) -> None:
    with site_of(home).locked("promotion of version 7"):
        told, code = reconcile_now(home)
    assert code == BUSY
    assert "promotion of version 7" in told
    assert reconcile_now(home)[1] == DONE


@pytest.mark.usefixtures("light_registry")
def test_a_night_with_a_damaged_record_is_explained_from_its_files(nights) -> None:
    assert nights.run().is_completed()
    sound = explain_gate(nights.home, "fake-0001")
    assert sound.startswith("promoted: version 1 is champion")
    file = nights.home / "runs/fake-0001/night.json"
    file.write_text("{")
    told = explain_gate(nights.home, "fake-0001")
    assert f"the record of night fake-0001 is damaged: {file}: not valid JSON" in told
    assert "judged again from the stored report and rules: the same" in told
    assert sound.splitlines()[2:] == told.splitlines()[-len(sound.splitlines()[2:]) :]
    report = nights.home / "runs/fake-0001/evaluate/report.json"
    content = report.read_text()
    report.write_text(content.replace("fake-0001", "other"))
    with pytest.raises(NightjarError, match="do not trust either"):
        explain_gate(nights.home, "fake-0001")
    report.unlink()
    assert "not judged again" in explain_gate(nights.home, "fake-0001")
    file.unlink()
    assert f"{file}: missing" in explain_gate(nights.home, "fake-0001")
    (nights.home / "runs/fake-0001/gate/decision.json").unlink()
    with pytest.raises(NightjarError, match="its decision cannot be told"):
        explain_gate(nights.home, "fake-0001")
    with pytest.raises(NightjarError, match=r"has no night '\.\./fake'"):
        explain_gate(nights.home, "../fake")


def test_a_night_that_is_at_work_is_no_open_problem(home: Path) -> None:
    night = NightBook(home).nights()[-1].night
    change(home, night, status="running")
    assert "is not done and nobody is at work on it" in shown(home)
    with only_night(home, "another"):
        told = shown(home)
    assert "a night is at work" in told
    assert "nobody is at work" not in told


def test_the_newest_rollback_is_told_with_its_reason(home: Path) -> None:
    assert "rolled back" not in shown(home)
    site, up, down = site_of(home), new_act(), new_act()
    site.registry.client.create_model_version(site.model, "nowhere", tags={DIGEST: "e"})
    for event in ("pending", "verified"):
        site.journal.write(Entry(event, site.model, up, previous="1", candidate="2", digest="e"))
    why = {"taken_down": "2", "restored": "1", "digest": "e", "why": "reward is -1, below 0", "by": "automation"}
    for event in ("rollback_pending", "rolled_back"):
        site.journal.write(Entry(event, site.model, down, **why))
    told = shown(home)
    assert "version 2 was rolled back to version 1 at " in told
    assert "by automation: reward is -1, below 0" in told
