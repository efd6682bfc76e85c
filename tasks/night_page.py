"""A night's page in markdown, for a person who decides in one minute; and the run's note that holds it.

Verdict, one sentence a rule, curves, answers old beside new, figures, details. Each thing is said once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tasks.headline import promoted_as
from tasks.summary import AnswerLine, NightSummary
from tasks.version_tags import ROLLBACK_REASON, ROLLED_BACK_AT
from training.evaluation.gate_markdown import bullet, plain

_ANSWERS = 3
_ANSWER_CHARACTERS = 240
_GAP = "&emsp;"
_MODELS = ("new", "champion", "reference", "new - champion", "new - reference")

NOTE_CHARACTERS = 7_900
"""MLflow keeps 8,000 characters of a tag, and the note is one."""
SUMMARY = "summary.md"
"""The artifact of the night's run that holds the whole page; in no folder, since MLflow compares only such files."""
DESCRIPTION_CHARACTERS = 4_900
"""MLflow keeps 5,000 characters of a version's description."""


def night_markdown(summary: NightSummary, pictures: Mapping[str, str] | None = None, run: str | None = None) -> str:
    """The page. `pictures`: what each shows -> where a browser finds it; left out where nothing can show them.

    `run`: the address of the night's run in MLflow, named where there are no pictures.
    """
    parts = [
        f"# Night {summary.night}",
        f"**{plain(summary.headline)}**",
        _registered(summary),
        _section("Gate", "\n".join(bullet(line.label, line.sentence) for line in summary.gate)),
        _section("Curves", _curves(pictures or {}, run)),
        _section("Answers, old beside new", _answers(summary)),
        _section("Figures", _figures(summary)),
        _section("Details", _details(summary)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def version_markdown(summary: NightSummary) -> str:
    """What the page of the night's version says: what became of it in that night, and a sentence a rule.

    In the past tense, since the page stays when another version is champion.
    """
    rules = "\n".join(bullet(line.label, line.sentence) for line in summary.gate)
    past = f"version {summary.version} was promoted by night {summary.night}"
    told, current = summary.headline, promoted_as(summary.version)
    told = past + told.removeprefix(current) if told.startswith(current) else f"{told} (night {summary.night})"
    return f"**{plain(told)}**\n\n{rules}\n"


def with_rollback(markdown: str, tags: Mapping[str, str]) -> str:
    """A version's page with when and why it was rolled back on top, as far as its tags say so."""
    if ROLLBACK_REASON not in tags:
        return markdown
    top = f"**rolled back{_at(tags.get(ROLLED_BACK_AT))}: {plain(tags[ROLLBACK_REASON])}**"
    return fit_note(f"{top}\n\n{markdown}", SUMMARY, DESCRIPTION_CHARACTERS)


def _at(moment: str | None) -> str:
    return f" {moment}" if moment else ""


def _registered(summary: NightSummary) -> str:
    alias = f" (`{summary.alias}`)" if summary.alias else ""
    version = f"version **{summary.version}** of `{summary.model}`{alias}" if summary.version else "nothing"
    return f"Registered: {version}. {summary.seconds:.0f} s in all."


def _curves(pictures: Mapping[str, str], run: str | None) -> str:
    """One line, since MLflow breaks at every end of one: pictures stand beside each other where the window is wide."""
    if pictures:
        return " ".join(f"![{title}]({place})" for title, place in pictures.items())
    return f"[On the night's run in MLflow]({run})." if run else ""


def _figures(summary: NightSummary) -> str:
    """Models side by side, without columns that are empty; what belongs to no model below."""
    rows = [(c.new, c.champion, c.reference, c.over_champion, c.over_reference) for c in summary.comparisons]
    kept = [number for number, _ in enumerate(_MODELS) if any(row[number] for row in rows)]
    names = [comparison.name for comparison in summary.comparisons]
    cells = [[name, *(row[number] for number in kept)] for name, row in zip(names, rows, strict=True)]
    table = _table(["with 95 % intervals", *(_MODELS[number] for number in kept)], cells)
    others = "\n".join(f"- {figure.name}: {figure.value}" for figure in summary.figures if not figure.compared)
    return "\n\n".join(part for part in (table, others) if part)


def _answers(summary: NightSummary) -> str:
    """The one that lost most, one from the middle, the one that won most, as the evaluation has ranked them."""
    answers = summary.answers
    few = answers if len(answers) <= _ANSWERS else (answers[0], answers[len(answers) // 2], answers[-1])
    head = ["prompt", f"{summary.old} (old)", "challenger (new)", "reward old", "reward new"]
    return _table(head, [_answer(answer) for answer in few])


def _answer(answer: AnswerLine) -> list[str]:
    rewards = ["" if reward is None else f"{reward:.3f}" for reward in (answer.old_reward, answer.new_reward)]
    return [*(_short(text) for text in (answer.prompt, answer.old, answer.new)), *rewards]


def _details(summary: NightSummary) -> str:
    rows = [[line.stage, f"{line.seconds:.1f}", line.words] for line in summary.stages]
    steps = "\n".join(f"- {_step(step)}" for step in summary.next_steps)
    fired = [[str(line.step), line.rule, line.action, line.sentence] for line in summary.guards]
    guards = _table(["step", "guard", "action", "in words"], fired)
    return "\n\n".join(part for part in (_table(["stage", "seconds", ""], rows), steps, guards) if part)


def _step(step: str) -> str:
    command, _, words = step.partition("    ")
    return f"`{command}` {words.strip()}"


def _short(text: str) -> str:
    return text if len(text) <= _ANSWER_CHARACTERS else text[: _ANSWER_CHARACTERS - 1] + "…"


def _section(title: str, content: str) -> str:
    return f"## {title}\n\n{content}" if content else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(plain, row))} |" for row in rows)])


def with_gaps(markdown: str) -> str:
    """`markdown` as MLflow wants it, which shows tables without padding: an em space behind each cell but a row's last,
    and an empty line below a table.

    As an entity, since MLflow trims the character itself. `plain` escapes every bar within a cell, so a bar behind a
    space ends one.
    """
    lines = [re.sub(r" \|(?=.)", f"{_GAP} |", line) if _is_row(line) else line for line in markdown.split("\n")]
    return re.sub(r"(?<!\\)\|\n\n", "|\n\n<br>\n\n", "\n".join(lines))


def fit_note(markdown: str, whole: str, limit: int = NOTE_CHARACTERS) -> str:
    """`markdown`, or its first lines with a closing sentence that the rest is in the artifact `whole`.

    Cut between lines, and never inside a table's head: a table that does not fit at least one row is left out.
    """
    if len(markdown) <= limit:
        return markdown
    ending = f"\n\n*The page is longer than a note may be: the rest is in the artifact `{whole}`.*\n"
    kept: list[str] = []
    room = limit - len(ending)
    for line in markdown.split("\n"):
        if len(line) + 1 > room:
            break
        room -= len(line) + 1
        kept.append(line)
    while kept and _dangles(kept[-1]):
        kept.pop()
    return "\n".join(kept) + ending


def _dangles(line: str) -> bool:
    """A heading with nothing below it, an empty line, or the head of a table without a row."""
    is_rule = line.startswith("|") and not _is_row(line)
    return not line.strip() or line.startswith("#") or is_rule


def _is_row(line: str) -> bool:
    """A table's head or row, not the rule between them."""
    return line.startswith("|") and not set(line) <= set("|-: ")
