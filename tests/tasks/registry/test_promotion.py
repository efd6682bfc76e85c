"""Promotion on a real registry: the order, the proofs, the races and the way back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.promotion import Force, promote
from tasks.registry import CHALLENGER, CHAMPION, PREVIOUS, ModelRegistry, Version
from tasks.registry_errors import (
    BannedVersion,
    LockHeld,
    PromotionError,
    PromotionRaced,
    ServingError,
    StoredBytesDiffer,
)
from tasks.rollback import rollback
from tasks.site import Site
from tasks.version_tags import DIGEST, FORCED, NIGHT, PROMOTED_AT, TREE, VERDICT

Register = Callable[..., Version]


def test_promotes_the_first_version_and_writes_the_journal_in_order(site: Site, register: Register) -> None:
    version = register(1)
    assert site.registry.alias(CHALLENGER) == version.number
    assert site.registry.alias(CHAMPION) is None

    done = promote(site, version.number, judged_against=None)

    assert (done.version, done.previous, done.changed) == (version.number, None, True)
    assert site.registry.alias(CHAMPION) == version.number
    assert site.registry.alias(CHALLENGER) is None
    assert site.registry.alias(PREVIOUS) is None
    assert [entry.event for entry in site.journal.entries()] == ["pending", "verified"]
    assert site.journal.entries()[0].night == "night-1"
    assert site.journal.unfinished() == []


def test_version_carries_its_lineage(site: Site, register: Register) -> None:
    tags = register(1).tags
    assert tags[VERDICT] == "PASS"
    assert tags[NIGHT] == "night-1"
    assert len(tags[DIGEST]) == len(tags[TREE]) == 64


def test_second_promotion_keeps_the_first_as_previous(site: Site, register: Register) -> None:
    first, second = register(1), register(2)
    promote(site, first.number, judged_against=None)
    promote(site, second.number, judged_against=first.number)
    assert site.registry.alias(PREVIOUS) == first.number
    assert site.journal.previous_champion(site.model) == first.number
    assert PROMOTED_AT in site.registry.version(second.number).tags


def test_repeating_a_promotion_changes_nothing(site: Site, register: Register) -> None:
    first = register(1)
    promote(site, first.number, judged_against=None)
    lines = len(site.journal.entries())
    again = promote(site, first.number, judged_against=None)
    assert not again.changed
    assert len(site.journal.entries()) == lines


def test_repeating_a_registration_finds_the_same_version(site: Site, register: Register) -> None:
    assert register(1).number == register(1).number
    assert len(site.registry.versions()) == 1
    assert register(1, night="another").number != register(1).number


def test_registering_again_passes_a_spoilt_version_over(site: Site, register: Register) -> None:
    """Else the night whose version was spoilt could never be registered, however often it is run."""
    spoilt = register(1)
    with site.stored(spoilt) as folder:
        weights = next(folder.rglob("model.safetensors"))
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    fresh = register(1)
    assert fresh.number != spoilt.number
    assert site.registry.alias(CHALLENGER) == fresh.number
    assert register(1).number == fresh.number, "the sound one is found again"
    promote(site, fresh.number, judged_against=None)
    with pytest.raises(StoredBytesDiffer):
        promote(site, spoilt.number, judged_against=fresh.number)


def test_bytes_changed_after_the_upload_are_refused_by_name(site: Site, register: Register) -> None:
    first, second = register(1), register(2)
    promote(site, first.number, judged_against=None)
    with site.stored(second) as folder:
        weights = next(folder.rglob("model.safetensors"))
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(StoredBytesDiffer, match=r"model\.safetensors differs"):
        promote(site, second.number, judged_against=first.number)
    assert site.registry.alias(CHAMPION) == first.number
    assert [entry.event for entry in site.journal.entries()] == ["pending", "verified"]


@pytest.mark.parametrize("name", ["MLmodel", "serving_model.py"])
def test_changed_code_or_metadata_is_refused(site: Site, register: Register, name: str) -> None:
    first = register(1)
    with site.stored(first) as folder:
        (folder / name).write_text((folder / name).read_text() + "\n# changed\n")
    with pytest.raises(StoredBytesDiffer, match=name):
        promote(site, first.number, judged_against=None)


def test_a_file_added_to_the_store_is_refused(site: Site, register: Register) -> None:
    first = register(1)
    with site.stored(first) as folder:
        (folder / "artifacts" / "extra.py").write_text("import os")
    with pytest.raises(StoredBytesDiffer, match=r"extra\.py was added"):
        promote(site, first.number, judged_against=None)


def test_a_version_of_unknown_origin_is_refused(site: Site) -> None:
    site.registry.ensure()
    foreign = site.registry.client.create_model_version(site.model, (site.home / "elsewhere").as_uri())
    with pytest.raises(StoredBytesDiffer, match="never verified"):
        promote(site, str(foreign.version), judged_against=None)


def test_manual_promotion_before_ours_stands(site: Site, register: Register) -> None:
    first, second, third = register(1), register(2), register(3)
    promote(site, first.number, judged_against=None)
    site.registry.set_alias(CHAMPION, second.number)
    with pytest.raises(PromotionRaced, match="judged against version 1"):
        promote(site, third.number, judged_against=first.number)
    assert site.registry.alias(CHAMPION) == second.number


class MovedByHand(ModelRegistry):
    """A registry in which somebody else moves the alias right after we did."""

    other = ""

    def set_alias(self, alias: str, version: str) -> None:
        super().set_alias(alias, version)
        if alias == CHAMPION:
            super().set_alias(CHAMPION, self.other)


def test_manual_promotion_during_ours_stands(site: Site, register: Register) -> None:
    first, second, third = register(1), register(2), register(3)
    promote(site, first.number, judged_against=None)
    registry = MovedByHand(site.model, site.tracking_uri)
    registry.other = third.number
    with pytest.raises(PromotionRaced, match="somebody else"):
        promote(dataclasses.replace(site, registry=registry), second.number, judged_against=first.number)
    assert site.registry.alias(CHAMPION) == third.number
    assert site.journal.unfinished() == []
    assert "was made champion meanwhile" in str(site.journal.entries()[-1].why)
    assert site.journal.champions(site.model) == (first.number,)


def test_a_version_that_fails_through_the_alias_is_taken_back(site: Site, register: Register) -> None:
    first, second = register(1), register(2)
    promote(site, first.number, judged_against=None)

    class BreaksAfterMove(ModelRegistry):
        """The stored weights turn into nonsense right after the alias moved."""

        def set_alias(self, alias: str, version: str) -> None:
            super().set_alias(alias, version)
            if alias == CHAMPION and version == second.number:
                with site.stored(second) as folder:
                    _fill_with_nan(next(folder.rglob("model.safetensors")))

    broken = dataclasses.replace(site, registry=BreaksAfterMove(site.model, site.tracking_uri))
    with pytest.raises(ServingError, match="not finite"):
        promote(broken, second.number, judged_against=first.number)
    assert site.registry.alias(CHAMPION) == first.number
    assert [entry.event for entry in site.journal.entries()][-2:] == ["pending", "reverted"]
    assert "not finite" in str(site.journal.entries()[-1].why)


def test_weights_that_are_not_finite_never_reach_the_alias(
    site: Site, register: Register, model_folder: Callable[[int], Path]
) -> None:
    _fill_with_nan(model_folder(90) / "model.safetensors")
    with pytest.raises(ServingError, match="not finite"):
        promote(site, register(90).number, judged_against=None)
    assert site.journal.entries() == []


def test_failing_journal_after_the_move_restores_the_alias(
    site: Site, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = register(1), register(2)
    promote(site, first.number, judged_against=None)
    real = site.journal.log.append

    def full_disk(record: dict[str, object]) -> object:
        if record["event"] != "pending":
            raise OSError(28, "No space left on device")
        return real(record)

    monkeypatch.setattr(site.journal.log, "append", full_disk)
    with pytest.raises(PromotionError, match="could not be put back"):
        promote(site, second.number, judged_against=first.number)
    assert site.registry.alias(CHAMPION) == first.number


def test_rolled_back_version_needs_force(site: Site, register: Register) -> None:
    first, second = register(1), register(2)
    promote(site, first.number, judged_against=None)
    promote(site, second.number, judged_against=first.number)
    rollback(site, why="it rambles")
    with pytest.raises(BannedVersion, match="it rambles"):
        promote(site, second.number, judged_against=first.number)
    same_weights = register(2, night="next")
    with pytest.raises(BannedVersion, match="same weights"):
        promote(site, same_weights.number, judged_against=first.number)

    promote(site, second.number, judged_against=first.number, force=Force("Ada", "the metric was wrong"))
    assert site.registry.alias(CHAMPION) == second.number
    assert site.registry.version(second.number).tags[FORCED] == "Ada: the metric was wrong"
    pending = [entry for entry in site.journal.entries() if entry.event == "pending"][-1]
    assert (pending.by, pending.why, pending.forced) == ("Ada", "the metric was wrong", True)
    assert site.journal.banned_versions(site.model) == {}


def test_force_without_a_reason_is_refused() -> None:
    with pytest.raises(PromotionError, match="who and why"):
        Force("Ada", "  ")


def test_two_promotions_at_once(site: Site, register: Register) -> None:
    first = register(1)
    with site.locked("another promotion"), pytest.raises(LockHeld, match="another promotion"):
        promote(site, first.number, judged_against=None)
    promote(site, first.number, judged_against=None)


def test_unfinished_act_of_a_dead_process_is_settled_first(site: Site, register: Register) -> None:
    first, second = register(1), register(2)
    promote(site, first.number, judged_against=None)
    line = {"event": "pending", "model": site.model, "act": "dead", "previous": "1", "candidate": second.number}
    site.journal.log.append(line)
    site.registry.set_alias(CHAMPION, second.number)
    promote(site, second.number, judged_against=first.number)
    assert [entry.event for entry in site.journal.entries()][2:] == ["pending", "reverted", "pending", "verified"]


def test_journal_lines_are_json_objects_of_known_shape(site: Site, register: Register) -> None:
    promote(site, register(1).number, judged_against=None)
    first = json.loads((site.home / "journal.jsonl").read_text().splitlines()[0])
    assert first["event"] == "pending"
    assert {"seq", "event", "model", "act", "candidate", "night", "digest", "time"} == set(first)


def _fill_with_nan(file: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    weights = {name: torch.full_like(tensor, float("nan")) for name, tensor in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
