"""What the gate tells: the explanation, the note, and a decision that comes back from disk or is refused."""

from __future__ import annotations

import pytest

from tests.training.evaluation.test_gate import OVER_REFERENCE, gate
from training.errors import GateError
from training.evaluation.gate import decide, decision_markdown, explain, read_decision, write_decision


def test_explain_puts_what_blocks_on_top(one):
    rules = gate(OVER_REFERENCE, {"metric": "reward", "max": 0.1, "name": "ceiling"})
    lines = explain(decide(one(challenger=0.56, champion=0.5, reference=0.25), rules, True)).splitlines()
    assert lines[0] == "FAIL: not met: ceiling; the champion stays"
    assert lines[2].startswith("  FAIL  ceiling: reward: 0.56")
    assert lines[3].startswith("  PASS  reward_vs_reference: reward: +0.31 over the reference")
    assert lines[4].startswith("  PASS  report: every number is finite")
    assert len(lines) == 5


def test_markdown_has_sentences_on_top_then_numbers(one):
    rules = gate(OVER_REFERENCE, {"metric": "reward", "max": 0.1, "severity": "warn"})
    text = decision_markdown(decide(one(challenger=0.56, champion=0.5, reference=0.25), rules, True))
    assert text.startswith("## Gate: passed\n\n**PASS: 1 of 1 blocking rules hold; next its version is registered")
    assert text.index("### Told, does not block") < text.index("### Holds") < text.index("### Numbers")
    assert "| reward_vs_reference | all | min_improvement | 0.31 | 0.26 to 0.36 | above 0 | 200 | PASS |" in text
    assert "| reward | all | max | 0.56 | 0.51 to 0.61 | at most 0.1 | 200 | FAIL (warn) |" in text


def test_markdown_says_what_happened_once_it_has(one):
    decision = decide(one(challenger=0.56, champion=0.5, reference=0.25), gate(OVER_REFERENCE), True)
    told = "promoted: version 3 is champion; the one blocking rule holds"
    page = decision_markdown(decision, told)
    assert page.startswith(f"## Gate: passed\n\n**{told}**\n")
    for early in ("may become", "next its version"):
        assert early not in page
    assert explain(decision, told).splitlines()[0] == told
    assert page.count("95 % interval") == 1, "a sentence a rule"
    assert "- **report**: every number is finite" in page, "a label that the sentence begins with is not said before it"


def test_markdown_keeps_data_as_data(make):
    nasty = "category=a|b [x](http://y) <img> *z*"
    parts = {nasty: make.measurement(0.9)}
    report = make.report(make.metric("reward", make.measurement(0.6), parts), has_champion=False)
    rule = {"metric": "reward", "min": 0.5, "slices": [nasty]}
    text = decision_markdown(decide(report, gate(rule), False))
    row = next(line for line in text.splitlines() if "img" in line)
    assert "a\\|b" in row
    assert "](" not in row
    assert "<img" not in row
    assert "\\*z\\*" in row
    assert row.replace("\\|", "").count("|") == 9


def test_a_decision_round_trips_and_names_what_it_judged(one, tmp_path):
    report = one(challenger=0.56, champion=0.5, reference=0.25)
    rules = gate(OVER_REFERENCE)
    decision = decide(report, rules, True)
    write_decision(tmp_path / "decision.json", decision)
    again = read_decision(tmp_path / "decision.json")
    assert again == decision
    assert explain(again) == explain(decision)
    assert decision.report_digest == report.digest()
    assert (decision.challenger, decision.champion, decision.night) == ("aa", "bb", "night-1")
    assert decision.gates_digest != decide(report, gate({**OVER_REFERENCE, "min_n": 31}), True).gates_digest
    assert decide(report, rules, True) == decision


@pytest.mark.parametrize(
    ("right", "wrong"),
    [('"verdict": "FAIL"\n}', '"verdict": "PASS"\n}'), ('"schema_version": 1', '"schema_version": 2')],
)
def test_a_decision_edited_by_hand_is_refused(one, tmp_path, right, wrong):
    path = tmp_path / "decision.json"
    write_decision(path, decide(one(challenger=0.1, champion=0.5, reference=0.25), gate(OVER_REFERENCE), True))
    text = path.read_text()
    assert text.count(right) == 1
    path.write_text(text.replace(right, wrong))
    with pytest.raises(GateError, match=r"decision\.json: not a valid GateDecision"):
        read_decision(path)
