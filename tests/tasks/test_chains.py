"""Which chain of a home a command means, and that no old record hinders finding out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.errors import NightjarError
from tasks.chains import chains_of
from tasks.last_config import last_config, site_of, sites_of
from tasks.night_state import NightBook
from tests.stored_nights import run_night
from training.errors import ContractError


def edit(file: Path, **keys: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


@pytest.fixture
def two(tmp_path: Path) -> Path:
    run_night(tmp_path, "quickstart", when=1000.0)
    run_night(tmp_path, "chat", 1, when=2000.0)
    run_night(tmp_path, "chat", 2, when=3000.0, model="chat-policy-2")
    return tmp_path


def test_one_chain_needs_no_name(tmp_path: Path) -> None:
    run_night(tmp_path, "chat", 9, when=1.0, model="old")
    run_night(tmp_path, "chat", 10, when=2.0)
    assert site_of(tmp_path).model == "chat-policy"
    assert last_config(tmp_path).name == "chat"


def test_of_several_none_is_guessed(two: Path) -> None:
    for look in (site_of, last_config):
        with pytest.raises(NightjarError) as refused:
            look(two)
        assert "quickstart (model quickstart-policy)" in str(refused.value)
        assert "chat (model chat-policy-2)" in str(refused.value)
        assert "--chain" in refused.value.hint
    assert site_of(two, chain="quickstart").model == "quickstart-policy"
    assert site_of(two, model="chat-policy-2").model == "chat-policy-2"
    assert last_config(two, chain="chat").registry.model == "chat-policy-2"
    assert last_config(two, model="quickstart-policy").name == "quickstart"


@pytest.mark.parametrize(
    "wanted", [{"chain": "chatt"}, {"model": "chatt"}, {"chain": "chat", "model": "quickstart-policy"}]
)
def test_what_is_not_there_is_named_beside_what_is(two: Path, wanted: dict[str, str]) -> None:
    with pytest.raises(NightjarError, match="has no") as refused:
        site_of(two, **wanted)
    assert "quickstart (model quickstart-policy)" in refused.value.hint


def test_all_models_of_a_home(two: Path) -> None:
    assert [site.model for site in sites_of(two)] == ["quickstart-policy", "chat-policy-2"]


def test_chains_of_one_model_share_its_registry_but_not_their_limits(tmp_path: Path) -> None:
    run_night(tmp_path, "weekdays", when=1.0, model="policy")
    run_night(tmp_path, "weekends", when=2.0, model="policy")
    assert site_of(tmp_path).model == "policy"
    with pytest.raises(NightjarError, match="holds 2 chains"):
        last_config(tmp_path)
    run_night(tmp_path, "elsewhere", when=3.0, model="policy", tracking_uri="http://127.0.0.1:5000")
    with pytest.raises(NightjarError, match="holds 3 chains"):
        site_of(tmp_path)


def test_an_empty_home_says_so(tmp_path: Path) -> None:
    for look in (site_of, last_config, sites_of):
        with pytest.raises(NightjarError, match="has seen no night yet"):
            look(tmp_path)


def test_records_of_a_later_version_are_read(tmp_path: Path) -> None:
    folder = run_night(tmp_path, "chat")
    edit(folder / "night.json", mood="cheerful", stages={"ppo": {"how": "done", "seconds": 1.0, "watts": 70}})
    config = json.loads((folder / "config.json").read_text())
    config["registry"]["quorum"] = 3
    config["ppo"]["temperature_of_the_sun"] = 5772
    edit(folder / "config.json", **config)
    (state,) = NightBook(tmp_path).nights()
    assert (state.night, state.stages["ppo"].seconds) == ("chat-0001", 1.0)
    assert last_config(tmp_path).registry.model == "chat-policy"
    assert site_of(tmp_path).model == "chat-policy"
    assert NightBook(tmp_path).unreadable() == []


def test_an_old_night_that_cannot_be_read_hinders_nothing(tmp_path: Path) -> None:
    old, bad = run_night(tmp_path, "chat", 1, when=1.0), run_night(tmp_path, "chat", 2, when=2.0)
    edit(bad / "night.json", status="dreaming")
    edit(bad / "config.json", gates={"rules": "none"})
    book = NightBook(tmp_path)
    assert [state.night for state in book.nights()] == ["chat-0001"]
    (problem,) = book.unreadable()
    assert str(bad / "night.json") in problem.message
    assert site_of(tmp_path).model == "chat-policy", "the registry section alone is enough"
    assert book.next_index("chat") == 3, "no new night may use the folder of an unreadable one"
    with pytest.raises(ContractError):
        book.load("chat-0002")
    (bad / "config.json").write_text("{")
    assert [chain.night for chain in chains_of(tmp_path)] == ["chat-0001"]
    (old / "config.json").write_text("{")
    with pytest.raises(NightjarError, match=r"no config\.json of its 2 nights can be read"):
        site_of(tmp_path)


def test_a_registry_section_that_no_longer_fits_keeps_its_place(tmp_path: Path) -> None:
    folder = run_night(tmp_path, "chat", tracking_uri="sqlite:////elsewhere/mlflow.db")
    config = json.loads((folder / "config.json").read_text())
    config["registry"]["retention_keep"] = -5
    edit(folder / "config.json", **config)
    assert site_of(tmp_path).tracking_uri == "sqlite:////elsewhere/mlflow.db"
