"""From a judged policy to a registered version, and from a version that passed to the champion."""

from __future__ import annotations

from pathlib import Path

from tasks.candidate import ServingSettings, register_candidate
from tasks.champion import lineage_tags
from tasks.model_manifest import ModelFiles
from tasks.night_work import NightWork
from tasks.promotion import Force, Promotion, promote
from tasks.registry_errors import PromotionError, PromotionRaced
from tasks.stages import code_version
from tasks.version_tags import Lineage
from training.data.snapshot import read_manifest
from training.evaluation.decision import GateDecision


def register_version(night: NightWork, decision: GateDecision) -> str:
    """Store the policy as a new version with its lineage, whatever the verdict; returns its number."""
    materials = night.materials
    assert materials.policy is not None
    assert materials.snapshot is not None
    night.keep()
    lineage = Lineage(
        verdict=decision.verdict,
        data_sha256=read_manifest(Path(materials.snapshot.path)).sha256,
        config_hash=night.state.config_hash,
        code_version=code_version(),
        reward_model_sha256=materials.reward_model.sha256 if materials.reward_model is not None else "",
        flow_run_id=night.state.flow_run_id or "",
        judged_against=night.state.champion.version if night.state.champion is not None else None,
    )
    files = ModelFiles(Path(materials.policy.path), Path(materials.adapter.path) if materials.adapter else None)
    models = night.config.models
    settings = ServingSettings(models.max_prompt_length, models.max_response_length, models.chat_template)
    run = night.tracker.run.register_run()
    version = register_candidate(night.site, files, night.state.night, lineage, run, settings)
    night.site.registry.tag(version.number, lineage_tags(materials, night.base_identity()))
    night.note(version=version.number)
    return version.number


def promote_version(night: NightWork, version: str, force: Force | None) -> Promotion:
    """Make the registered version champion. Raises PromotionError and its kin; the champion is then the one before."""
    champion = night.state.champion
    try:
        done = promote(
            night.site,
            version,
            judged_against=champion.version if champion is not None else None,
            night=night.state.night,
            force=force,
        )
    except PromotionError as error:
        if isinstance(error, PromotionRaced):
            night.thaw()
        # Killed behind its promotion, and taken down before it went on: the night has noted what holds no more.
        night.note(promoted=False)
        raise
    night.note(promoted=True)
    return done
