"""Names of the tags on a model version, and the lineage that they tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DIGEST = "nightjar.model_sha256"
"""sha256 of the model folder, as in the stage's manifest."""
TREE = "nightjar.stored_sha256"
"""sha256 over everything stored for the version, as read back right after the upload."""
NIGHT = "nightjar.night"
VERDICT = "nightjar.gate_verdict"
DATA = "nightjar.data_sha256"
CONFIG = "nightjar.config_hash"
CODE = "nightjar.code_version"
REWARD_MODEL = "nightjar.reward_model_sha256"
FLOW_RUN = "nightjar.flow_run_id"
JUDGED_AGAINST = "nightjar.judged_against"
PROMOTED_AT = "nightjar.promoted_at"
FORCED = "nightjar.forced"
ROLLED_BACK_AT = "nightjar.rolled_back_at"
ROLLBACK_REASON = "nightjar.rollback_reason"


@dataclass(frozen=True)
class Lineage:
    """Where a version comes from; every field becomes a tag, empty ones do not.

    `verdict`: of the gate (PASS, FAIL, INCONCLUSIVE, ERROR); `data_sha256`: of the snapshot, as its
    manifest and the run's data set say; `reward_model_sha256`: of
    the student that scored; `judged_against`: the champion's version at the evaluation, or null on a cold start.
    """

    verdict: str
    data_sha256: str
    config_hash: str
    code_version: str = ""
    reward_model_sha256: str = ""
    flow_run_id: str = ""
    judged_against: str | None = None

    def tags(self) -> Mapping[str, str]:
        """Tag names and values."""
        named = {
            VERDICT: self.verdict,
            DATA: self.data_sha256,
            CONFIG: self.config_hash,
            CODE: self.code_version,
            REWARD_MODEL: self.reward_model_sha256,
            FLOW_RUN: self.flow_run_id,
            JUDGED_AGAINST: self.judged_against or "none",
        }
        return {name: value for name, value in named.items() if value}
