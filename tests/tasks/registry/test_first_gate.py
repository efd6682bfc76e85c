"""A gate that could promote nothing while there is no champion is refused before any compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.schema.gates import GatesConfig
from configs.schema.registry import RegistryConfig
from tasks.admission import check_first_gate
from tasks.registry import CHAMPION
from tasks.site import Site
from training.errors import ConfigError

BETTER: dict[str, Any] = {"metric": "reward", "direction": "higher", "min_improvement": 0}
WINS: dict[str, Any] = {"metric": "win_rate", "min": 0.5, "needs_champion": True}
BAND: dict[str, Any] = {"metric": "kl_ref", "max": 5.0}


@pytest.fixture
def plain(home: Path) -> Site:
    return Site.open(home, RegistryConfig(model="chat-policy"))


def gates(*rules: dict[str, Any]) -> GatesConfig:
    return GatesConfig.model_validate({"rules": rules})


@pytest.mark.parametrize(
    "rules", [(BETTER,), (BETTER, WINS), (WINS, BAND | {"severity": "warn"})], ids=["better", "wins", "only-warned"]
)
def test_rules_that_all_need_a_champion_are_refused_while_there_is_none(
    plain: Site, rules: tuple[dict[str, Any], ...]
) -> None:
    with pytest.raises(ConfigError, match="chat-policy has no champion yet") as refused:
        check_first_gate(plain, gates(*rules))
    assert "baseline: reference" in refused.value.hint
    plain.registry.ensure()
    number = str(plain.registry.client.create_model_version("chat-policy", "nowhere").version)
    plain.registry.set_alias(CHAMPION, number)
    check_first_gate(plain, gates(*rules))


@pytest.mark.parametrize(
    "rule", [BAND, BETTER | {"baseline": "reference"}, BETTER | {"max": 9.0}], ids=["band", "reference", "with-a-band"]
)
def test_one_rule_that_holds_without_a_champion_is_enough(plain: Site, rule: dict[str, Any]) -> None:
    check_first_gate(plain, gates(WINS, rule))
