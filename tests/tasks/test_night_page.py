"""The page that a person decides by: in order, and each thing said once."""

from __future__ import annotations

from dataclasses import replace

from configs.schema import NightConfig
from tasks.night_page import night_markdown, version_markdown, with_gaps, with_rollback
from tasks.night_state import NightState, StageNote
from tasks.summary import NightSummary, summarise
from tasks.version_tags import ROLLBACK_REASON, ROLLED_BACK_AT
from training.evaluation.gate import GateDecision, decide
from training.evaluation.report import EvaluationReport, MetricBuilder, ModelDigest
from training.evaluation.report_records import SampleAnswer

RULES = [
    {"metric": "reward", "direction": "higher", "baseline": "reference", "min_improvement": 0},
    {"name": "holds", "metric": "reward", "direction": "higher", "max_regression": 0.05},
    {"name": "stays_near", "metric": "kl_ref", "max": 0.3},
]
CONFIG = NightConfig.model_validate(
    {
        "data": {"source": "d"},
        "models": {"base": "m", "max_prompt_length": 64, "max_response_length": 64},
        "gates": {"rules": RULES},
    }
)
ORDER = ["# Night", "promoted: version 3", "## Gate", "## Curves", "## Answers", "## Figures", "## Details"]


def judged(samples: int = 9) -> tuple[EvaluationReport, GateDecision]:
    start = [0.01 * number for number in range(40)]
    builder = MetricBuilder(seed=1, confidence=[0.95])
    metrics = (
        builder.mean("reward", [value + 0.5 for value in start], [value + 0.2 for value in start], start),
        builder.win_rate("win_rate", [value + 0.5 for value in start], [value + 0.2 for value in start]),
        builder.mean("kl_ref", [0.1] * 40, [0.05] * 40, [0.0] * 40, unit="nats/token"),
    )
    answers = tuple(
        SampleAnswer(
            prompt_id=str(n), prompt=f"ask {n}", challenger=f"new {n}", champion=f"old {n}", reference=f"first {n}",
            challenger_reward=1.0, champion_reward=0.5, reference_reward=0.0,
        )
        for n in range(samples)
    )  # fmt: skip
    digests = {role: ModelDigest(name=role, sha256=role) for role in ("challenger", "champion", "reference")}
    report = EvaluationReport(
        night="n-0002", seed=1, prompt_set_digest="p", prompt_count=40, metrics=metrics, samples=answers, **digests
    )
    return report, decide(report, CONFIG.gates, has_champion=True)


def page_of(report: EvaluationReport, decision: GateDecision) -> NightSummary:
    state = NightState(
        night="n-0002", index=2, name="n", config_hash="h", fingerprint="f", started=100.0, ended=160.0,
        status="finished", verdict="PASS", version="3", promoted=True,
        stages={"ppo": StageNote(how="done", seconds=42.0, attempts=2)},
    )  # fmt: skip
    return summarise(state, CONFIG, {}, report, decision)


def test_verdict_rules_curves_answers_figures_details_in_this_order() -> None:
    page = night_markdown(page_of(*judged()), {"reward and kl": "get-artifact?path=a.png"})
    places = [page.index(part) for part in ORDER]
    assert places == sorted(places)
    assert "![reward and kl](get-artifact?path=a.png)" in page
    assert "version **3** of `nightjar-policy` (`champion`)" in page


def test_each_rule_is_said_once_and_nothing_is_promised_any_more() -> None:
    report, decision = judged()
    page = night_markdown(page_of(report, decision))
    assert decision.verdict == "PASS"
    for rule in decision.rules:
        assert page.replace("**", "").count(rule.sentence) == 1, rule.label
        assert page.count(f"- **{rule.label}**: ") == 1, "each line begins with its rule, to find it by"
    assert page.count("stays_near") == 1
    assert "may become" not in page


def test_the_page_of_the_version_says_what_became_of_it_and_why() -> None:
    report, decision = judged()
    page = version_markdown(page_of(report, decision))
    assert page.startswith("**version 3 was promoted by night n-0002; all 3 blocking rules hold**\n")
    below = with_rollback(page, {ROLLBACK_REASON: "it rambles", ROLLED_BACK_AT: "2025-06-03T04:00:00Z"})
    assert below == f"**rolled back 2025-06-03T04:00:00Z: it rambles**\n\n{page}"
    assert with_rollback(page, {}) == page
    assert all(page.replace("**", "").count(rule.sentence) == 1 for rule in decision.rules)


def test_models_stand_side_by_side_with_intervals() -> None:
    report, decision = judged()
    page = night_markdown(page_of(report, decision))
    head = "| with 95 % intervals | new | champion | reference | new - champion | new - reference |"
    assert head in page
    (row,) = [line for line in page.splitlines() if line.startswith("| reward ")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert [cell.split(" ")[0] for cell in cells[1:]] == ["0.695", "0.395", "0.195", "+0.300", "+0.500"]
    assert all("[" in cell for cell in cells[1:])
    assert "| win rate | 1.000" in page
    assert "| kl ref, nats/token | 0.100" in page


def test_without_a_champion_there_is_no_column_of_one() -> None:
    report, _ = judged()
    first = report.metrics[0].overall.model_copy(update={"champion": None, "versus_champion": None})
    metric = report.metrics[0].model_copy(update={"overall": first})
    samples = tuple(sample.model_copy(update={"champion": None}) for sample in report.samples)
    cold = report.model_copy(update={"champion": None, "metrics": (metric,), "samples": samples})
    page = night_markdown(page_of(cold, decide(cold, CONFIG.gates, has_champion=False)))
    assert "| with 95 % intervals | new | reference | new - reference |" in page
    assert "| prompt | reference (old) | challenger (new) |" in page
    assert "| ask 0 | first 0 | new 0 | 0.000 | 1.000 |" in page


def test_the_worst_a_middle_and_the_best_answer_stand_old_beside_new() -> None:
    page = night_markdown(page_of(*judged()))
    assert "| prompt | champion (old) | challenger (new) | reward old | reward new |" in page
    shown = [number for number in range(9) if f"| ask {number} | old {number} | new {number} | 0.500 | 1.000 |" in page]
    assert shown == [0, 4, 8]


def test_text_of_models_can_neither_break_the_table_nor_load_pictures() -> None:
    report, decision = judged(1)
    evil = "a|b\n<img src=x> ![x](http://y) " + "long " * 100
    summary = page_of(report, decision)
    page = night_markdown(replace(summary, answers=(replace(summary.answers[0], new=evil),)))
    (row,) = [line for line in page.splitlines() if "ask 0" in line]
    assert row.count(" | ") == 4
    assert "a\\|b" in row
    assert "<img" not in row
    assert "](http" not in row
    assert len(row) < 400


def test_gaps_stand_between_the_cells_of_tables_and_below_them_and_nowhere_else() -> None:
    page = "a | b\n\n| head | of\\|one |  |\n| --- | --- | --- |\n| 1 | 2 |  |\n\nend \\|\n\n"
    cells = "a | b\n\n| head&emsp; | of\\|one&emsp; |  |\n| --- | --- | --- |\n| 1&emsp; | 2&emsp; |  |\n\n"
    assert with_gaps(page) == f"{cells}<br>\n\nend \\|\n\n"
    whole = night_markdown(page_of(*judged()), {"a": "b"})
    assert with_gaps(whole).replace("&emsp;", "").replace("<br>\n\n", "") == whole, "nothing else changes"


def test_pictures_are_one_line_to_stand_beside_each_other() -> None:
    page = night_markdown(page_of(*judged()), {"a": "b", "c": "d"})
    assert "\n\n![a](b) ![c](d)\n\n" in page


def test_where_no_picture_can_be_shown_the_page_says_where_the_curves_are() -> None:
    summary = page_of(*judged())
    address = "http://m:5000/#/experiments/1/runs/2"
    assert f"## Curves\n\n[On the night's run in MLflow]({address})." in night_markdown(summary, run=address)
    assert address not in night_markdown(summary, {"a": "b"}, address)
    assert "## Curves" not in night_markdown(summary)


def test_a_night_that_failed_early_has_a_short_page() -> None:
    state = NightState(
        night="n-0001", index=1, name="n", config_hash="h", fingerprint="f", started=100.0, ended=160.0,
        status="failed", reason="disk full", stages={"a|b": StageNote(how="failed", seconds=1)},
    )  # fmt: skip
    page = night_markdown(summarise(state, CONFIG, {}))
    assert "**failed: disk full**" in page
    assert "Registered: nothing" in page
    assert "a\\|b" in page
    assert "## Gate" not in page
