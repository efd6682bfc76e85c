"""The run's note: what a person reads first, cut where MLflow would cut it silently."""

from __future__ import annotations

NOTE_CHARACTERS = 7_900
"""MLflow keeps 8,000 characters of a tag, and the note is one."""


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
    is_rule = line.startswith("|") and set(line) <= set("|-: ")
    return not line.strip() or line.startswith("#") or is_rule
