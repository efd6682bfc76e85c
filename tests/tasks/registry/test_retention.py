"""Retention never deletes what somebody may still go back to."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from tasks.promotion import promote
from tasks.registry import CHALLENGER, CHAMPION, Version
from tasks.retention import plan, retain
from tasks.rollback import rollback
from tasks.site import Site
from tasks.version_tags import DIGEST

NUMBERS = st.integers(1, 30).map(str)


def version(number: str, ours: bool = True) -> Version:
    return Version(number, "models:/m-x", None, 0, {DIGEST: "d"} if ours else {})


@given(
    st.sets(NUMBERS, min_size=1), st.dictionaries(st.text(max_size=3), NUMBERS, max_size=4), st.sets(NUMBERS),
    st.integers(0, 5),
)  # fmt: skip
def test_never_touches_what_is_protected(
    numbers: set[str], aliased: dict[str, str], returnable: set[str], keep: int
) -> None:
    decided = plan([version(n) for n in numbers], aliased, dict.fromkeys(returnable, ""), keep)
    newest = sorted(numbers, key=int)[max(0, len(numbers) - keep) :]
    untouchable = set(aliased.values()) | returnable | set(newest)
    assert set(decided.delete) == numbers - untouchable


def test_versions_of_other_people_stay() -> None:
    decided = plan([version("1", ours=False), version("2")], {}, {}, 0)
    assert decided.delete == ("2",)
    assert decided.protected == {"1": "not registered by Nightjar"}


def test_real_versions_go_and_the_champion_still_rolls_back(
    site: Site, register: Callable[..., Version]
) -> None:
    one, two, three, four, five = (register(seed).number for seed in (1, 2, 3, 4, 5))
    promote(site, two, judged_against=None)
    promote(site, three, judged_against=two)

    decided = retain(site, keep=0)

    assert decided.delete == (one, four)
    assert decided.protected[five] == f"alias {CHALLENGER}"
    assert [v.number for v in site.registry.versions()] == [two, three, five]
    assert [entry.taken_down for entry in site.journal.entries() if entry.event == "retired"] == [one, four]
    assert rollback(site, why="test").restored == two
    assert site.registry.alias(CHAMPION) == two
    assert retain(site, keep=0).delete == (three,)
    assert two in [version.number for version in site.registry.versions()]
