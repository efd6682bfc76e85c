"""Other draws every night, the same whenever a night goes on, and finished stages found again while the data stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.schema import NightConfig
from tasks.night import Opened, Source, open_night
from tasks.night_seeds import night_seed
from tasks.night_state import NightBook, NightState
from tasks.stages import SHAPES, NightFacts, spec_of
from tests.tasks.test_stages import FULL

DATA, NIGHT = {"sft", "reward", "distill"}, {"ppo", "evaluate"}


def config_of(**sections) -> NightConfig:
    content = {
        "seed": 7,
        "data": {"source": "d"},
        "models": {"base": "m", "max_prompt_length": 64, "max_response_length": 64},
        "gates": {"rules": [{"metric": "reward", "min": 0.0}]},
    } | sections
    return NightConfig.model_validate(content)


class Data:
    """A source whose fingerprint the test sets."""

    def __init__(self) -> None:
        self.print = "monday"

    def night(self, book: NightBook, config: NightConfig, again: bool = False) -> NightState:
        opened = open_night(book, config, Source(lambda index: None, lambda: self.print), again)
        assert isinstance(opened, Opened), opened
        return opened.state


def end(book: NightBook, state: NightState, status: str = "finished") -> None:
    book.change(state, status=status, ended=state.started + 1)


def seeds_of(state: NightState, config: NightConfig) -> dict[str, int]:
    seeds = {"night": state.seed, "data": state.data_seed}
    facts = NightFacts(state.night, state.index, Path("/h"), state.fingerprint, "d", config, seeds)
    return {stage: spec_of(stage, facts, FULL).seed for stage in SHAPES}


def test_a_first_night_draws_from_the_configs_seed(tmp_path: Path) -> None:
    state = Data().night(NightBook(tmp_path), config_of())
    assert (state.seed, state.data_seed) == (7, 7)
    assert set(seeds_of(state, config_of()).values()) == {7}


def test_a_later_night_on_new_data_draws_anew_where_it_trains_and_samples(tmp_path: Path) -> None:
    book, data, config = NightBook(tmp_path), Data(), config_of()
    first = data.night(book, config)
    end(book, first)
    data.print = "tuesday"
    second = data.night(book, config)
    before, after = seeds_of(first, config), seeds_of(second, config)
    assert {stage for stage in SHAPES if before[stage] != after[stage]} == DATA | NIGHT
    assert after["validate"] == 7, "the split, and so the frozen evaluation prompts, stay"


def test_the_same_data_again_finds_what_was_trained_on_it_and_samples_anew(tmp_path: Path) -> None:
    """A changed PPO setting, or a night asked for again, must not train the reward models a second time."""
    book, data, config = NightBook(tmp_path), Data(), config_of()
    end(book, data.night(book, config))
    data.print = "tuesday"
    second = data.night(book, config)
    end(book, second, "failed")
    other = config_of(ppo={"actor_lr": 1e-5})
    third = data.night(book, other)
    assert third.index == 3
    before, after = seeds_of(second, config), seeds_of(third, other)
    assert {stage for stage in SHAPES if before[stage] != after[stage]} == NIGHT


def test_a_night_keeps_its_seeds_when_it_goes_on(tmp_path: Path) -> None:
    book, data, config = NightBook(tmp_path), Data(), config_of()
    end(book, data.night(book, config))
    data.print = "tuesday"
    killed = data.night(book, config)
    assert data.night(book, config) == killed
    end(book, killed, "failed")
    again = data.night(book, config)
    assert (again.night, again.seed, again.data_seed) == (killed.night, killed.seed, killed.data_seed)
    assert book.load(killed.night).seed == killed.seed, "it stands on disk"


def test_another_seed_in_the_config_is_another_chain_of_draws(tmp_path: Path) -> None:
    book, data = NightBook(tmp_path), Data()
    end(book, data.night(book, config_of(seed=1)))
    second = data.night(book, config_of(seed=2))
    assert second.data_seed == 2, "the data are the first night's, the seed is not"
    assert second.seed not in (1, 2, night_seed(1, 2))


def test_a_state_of_before_draws_from_the_config(tmp_path: Path) -> None:
    state = Data().night(NightBook(tmp_path), config_of())
    old = NightState.model_validate(state.model_dump(exclude={"seed", "data_seed"}))
    assert set(seeds_of(old, config_of(seed=5)).values()) == {5}


@pytest.mark.parametrize("root", [0, 7, 2**31 - 1])
def test_seeds_of_nights_differ_and_fit_every_generator(root: int) -> None:
    seeds = [night_seed(root, index) for index in range(1, 400)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
