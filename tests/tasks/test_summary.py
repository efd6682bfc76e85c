"""The page of a night, and the small stores beside it."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import pytest

from configs.schema import NightConfig
from tasks.headline import headline
from tasks.model_store import find_model, keep_model
from tasks.night_page import night_markdown
from tasks.night_state import NightBook, NightState, StageNote
from tasks.progress import MetricsTail, Silent, listener, listening
from tasks.report_figures import with_interval
from tasks.summary import NightSummary, summarise
from training.contract import StageResult, file_ref
from training.evaluation.gate import decide
from training.evaluation.report import Estimate, EvaluationReport, Interval, MetricBuilder, ModelDigest
from training.recorder import Recorder

BETTER = {"metric": "reward", "direction": "higher", "baseline": "reference", "min_improvement": 0}


def config_of() -> NightConfig:
    content = {
        "data": {"source": "d"},
        "models": {"base": "m", "max_prompt_length": 64, "max_response_length": 64},
        "gates": {"rules": [BETTER]},
    }
    return NightConfig.model_validate(content)


def report_of(gain: float) -> EvaluationReport:
    start = [0.01 * number for number in range(40)]
    new = [value + gain for value in start]
    metrics = (MetricBuilder(seed=1, confidence=[0.95]).mean("reward", new, None, start),)
    return EvaluationReport(
        night="n-0001", seed=1, prompt_set_digest="p", prompt_count=40,
        challenger=ModelDigest(name="c", sha256="c"), reference=ModelDigest(name="r", sha256="r"), metrics=metrics,
    )  # fmt: skip


def state_of(**fields) -> NightState:
    base = {
        "night": "n-0001", "index": 1, "name": "n", "config_hash": "h", "fingerprint": "f", "started": 100.0,
        "ended": 160.0, "stages": {"ppo": StageNote(how="done", seconds=42.0)},
    }  # fmt: skip
    return NightState.model_validate(base | fields)


def result(stage: str, **metrics: float | None) -> StageResult:
    return StageResult(stage, "k", {}, metrics, {}, 1.0, {})


def test_page_of_a_promoted_night() -> None:
    report = report_of(0.5)
    decision = decide(report, config_of().gates, has_champion=False)
    state = state_of(status="finished", verdict="PASS", version="3", promoted=True)
    results = {"reward": result("reward", accuracy=0.8), "distill": result("distill", accuracy=None)}
    page = summarise(state, config_of(), results, report, decision)
    assert (page.version, page.alias, page.seconds) == ("3", "champion", 60.0)
    figures = {figure.name: figure.value for figure in page.figures}
    assert figures["teacher accuracy on held-out pairs"] == "0.800"
    assert figures["student accuracy on held-out pairs"] == "not measured", "a missing number is never 0"
    assert figures["reward, new policy minus reference"].startswith("+0.500 [")
    assert [(line.verdict, line.sentence) for line in page.gate] == [("PASS", r.sentence) for r in decision.rules[::-1]]
    assert page.headline == "promoted: version 3 is champion; the one blocking rule holds"


def test_stages_stand_in_the_order_of_the_night_also_when_read_from_disk(tmp_path: Path) -> None:
    done = StageNote(how="done", seconds=1.0)
    stages = dict.fromkeys(("validate", "sft", "reward", "annotate", "ppo", "evaluate"), done)
    book = NightBook(tmp_path)
    book.save(state_of(status="finished", stages=stages, acts=dict.fromkeys(("gate", "register", "promote"), done)))
    page = summarise(book.load("n-0001"), config_of(), {})
    assert [line.stage for line in page.stages] == [*stages, "gate", "register", "promote"]


def test_page_of_a_refused_and_of_a_failed_night() -> None:
    report = report_of(-0.5)
    decision = decide(report, config_of().gates, has_champion=False)
    page = summarise(state_of(status="finished", verdict="FAIL", version="4"), config_of(), {}, report, decision)
    assert page.alias == "challenger"
    assert any("gate explain n-0001" in step for step in page.next_steps)
    failed = summarise(state_of(status="failed", reason="disk full"), config_of(), {})
    assert page.headline == f"not promoted: {decision.sentence}"
    assert failed.headline == "failed: disk full"


def test_every_firing_of_a_guard_is_a_line_of_the_page(tmp_path: Path) -> None:
    """Also where the guards have ended the stage, which then has no result."""
    recorder = Recorder(tmp_path / "metrics.jsonl")
    for step in range(1, 21):
        recorder.event("guard", step=step, rule="kl_ref > 0.2", action="warn", value=0.25, sentence=f"look {step}")
    recorder.event("rollback", step=20, to_step=8, round=3, rule="kl_ref > 0.3", sentence="kl_ref = 0.4 is > 0.3")
    recorder.close()
    notes = {"ppo": StageNote(how="failed", seconds=1.0, directory=str(tmp_path))}
    page = summarise(state_of(status="failed", reason="stopped by a guard", stages=notes), config_of(), {})
    assert [line.step for line in page.guards] == [*range(1, 21), 20]
    shown = night_markdown(page)
    assert "| 7 | kl_ref > 0.2 | warn | look 7 |" in shown
    assert "the state of step 8 is back, the rest of round 3 is given up" in shown
    assert "step 7: look 7" in [row["in words"] for row in page.rows() if row["part"] == "guard"]
    quiet = summarise(state_of(), config_of(), {"ppo": result("ppo", rollbacks=2.0)})
    assert quiet.guards == ()
    assert ("rollbacks by guards", "2") in [(figure.name, figure.value) for figure in quiet.figures]


def test_the_headline_says_what_happened_and_not_what_the_gate_allows() -> None:
    gates = config_of().gates
    good, bad = decide(report_of(0.5), gates, has_champion=False), decide(report_of(-0.5), gates, has_champion=False)
    promoted = state_of(status="finished", verdict="PASS", version="3", promoted=True)
    assert "may become" in good.sentence, "the gate speaks before anything has happened"
    assert "may become" not in headline(promoted, good)
    assert headline(promoted, bad).startswith("promoted: version 3 is champion; forced by a person, although the gate")
    banned = state_of(status="finished", verdict="FAIL", version="3", reason="version 3 was rolled back before")
    assert headline(banned, good) == (
        "not promoted, although the one blocking rule holds: version 3 was rolled back before"
    )


def test_the_table_says_all_that_the_terminal_shows() -> None:
    """Whatever the last screen of a night says stands in a cell of the artifact as well."""
    from rich.console import Console

    from flows.summary_view import summary_view

    report = report_of(0.5)
    decision = decide(report, config_of().gates, has_champion=False)
    stages = {"sft": StageNote(how="reused", seconds=0), "ppo": StageNote(how="done", seconds=42, attempts=2)}
    acts = {"gate": StageNote(how="done", seconds=0.25), "promote": StageNote(how="done", seconds=7.5)}
    state = state_of(status="finished", verdict="PASS", version="3", promoted=True, stages=stages, acts=acts)
    results = {"reward": result("reward", accuracy=0.8), "distill": result("distill", student_teacher_kl=0.01)}
    page = summarise(state, config_of(), results | {"ppo": result("ppo", rollbacks=2.0)}, report, decision)
    console = Console(width=400, record=True, file=StringIO())
    console.print(summary_view(page))
    screen = console.export_text()
    cells = {cell for row in page.rows() for cell in row.values() if cell}
    told = cells - {"verdict", "stage", "figure", "gate", "registered", "next"}
    for cell in told - {f"{seconds} s" for seconds in ("0.0", "42.0", "0.2", "7.5", "60.0")}:
        assert cell in screen, cell
    words = {(row["what"], row["value"], row["in words"]) for row in page.rows() if row["part"] == "stage"}
    assert ("ppo", "42.0 s", "done, 2 attempts") in words
    assert ("promote", "7.5 s", "done") in words
    assert ("rollbacks by guards", "2") in {(row["what"], row["value"]) for row in page.rows()}
    for line in filter(str.strip, screen.splitlines()):
        parts = [part.strip() for part in re.split(r"[│┃╭╮╰╯┌┐┏┡└┴─━┓┩┘┬┳╇┼├┤]+|  +", line) if part.strip()]
        for part in parts:
            assert part in _TITLES or any(part in cell for cell in cells | _with_units(page)), part


_TITLES = {
    "Stages", "seconds", "Figures", "95 % intervals in brackets", "Gate", "a sentence a rule", "Verdict", "Registered",
    "Next", "night n-0001",
}  # fmt: skip


def _with_units(page: NightSummary) -> set[str]:
    """The line on the version, which the table has in three cells."""
    return {f"registered: version {page.version} of {page.model}, alias {page.alias}"}


def test_interval_is_the_95_percent_one_or_none() -> None:
    wide = Interval(confidence=0.99, low=0.0, high=1.0)
    fitting = Interval(confidence=0.95, low=0.25, high=0.75)
    estimate = Estimate(value=0.5, n=9, nonfinite=0, values_digest="", intervals=(fitting, wide))
    assert with_interval(estimate) == "0.500 [0.250, 0.750]"
    assert with_interval(Estimate(value=0.5, n=9, nonfinite=0, values_digest="", intervals=())) == "0.500"


def test_models_are_kept_once_by_content_and_checked(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights").write_text("w")
    kept = keep_model(tmp_path / "home", file_ref(model))
    assert keep_model(tmp_path / "home", file_ref(model)) == kept
    assert find_model(tmp_path / "home", kept.sha256) == kept
    (Path(kept.path) / "weights").unlink()
    (Path(kept.path) / "weights").write_text("tampered")
    assert find_model(tmp_path / "home", kept.sha256) is None
    assert find_model(tmp_path / "home", "0" * 64) is None
    assert find_model(tmp_path / "home", None) is None
    assert (model / "weights").read_text() == "w"


class Heard(Silent):
    def __init__(self) -> None:
        self.told: list[tuple] = []

    def stage_moved(self, stage, step, total, shown, doing=""):
        self.told.append((step, total))

    def stage_event(self, stage, kind, fields):
        self.told.append((kind, dict(fields)))


def test_tail_tells_each_line_once_and_survives_torn_lines_and_rewinds(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "metrics.jsonl")
    recorder.progress(1, 9)
    heard = Heard()
    tail = MetricsTail(tmp_path, "ppo", heard)
    tail.poll()
    assert heard.told == [], "what was there before is not told again"
    checkpoint = recorder.position()
    recorder.record(1, {"loss": 1.0})
    recorder.progress(2, 9)
    recorder.event("guard", sentence="kl_ref above 0.3")
    tail.poll()
    tail.poll()
    assert heard.told == [(2, 9), ("guard", {"sentence": "kl_ref above 0.3"})]
    with (tmp_path / "metrics.jsonl").open("ab") as stream:
        stream.write(b'{"event": "progress", "step": 3')
    tail.poll()
    assert len(heard.told) == 2, "half a line is not a line"
    recorder.rewind(checkpoint)
    tail.poll()
    recorder.progress(2, 9)
    tail.poll()
    assert heard.told[-1] == (2, 9)


def test_tail_tells_what_a_phase_without_steps_does(tmp_path: Path) -> None:
    heard: list[tuple] = []

    class Hearing(Silent):
        def stage_moved(self, stage, step, total, shown, doing=""):
            heard.append((stage, doing, step, total))

    recorder = Recorder(tmp_path / "metrics.jsonl")
    tail = MetricsTail(tmp_path, "distill", Hearing())
    told = recorder.counting("teacher scores", 512)
    told(128)
    recorder.progress(1, 9, loss=0.5)
    tail.poll()
    phase = ("distill", "teacher scores")
    assert heard == [(*phase, 0, 512), (*phase, 128, 512), ("distill", "", 1, 9)]


def test_listener_is_silent_outside_and_restored_after() -> None:
    heard = Heard()
    with listening(heard):
        assert listener() is heard
    assert isinstance(listener(), Silent)


def test_listener_is_restored_after_an_error() -> None:
    with pytest.raises(RuntimeError), listening(Heard()):
        raise RuntimeError
    assert not isinstance(listener(), Heard)
