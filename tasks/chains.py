"""Which chains of nights a home holds, and which registered model belongs to each.

Read from the configs that lie beside the nights, as little of them as is needed: a rollback must not fail because some
old file was written by another version.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from configs.errors import NightjarError
from configs.schema.registry import RegistryConfig
from tasks.lenient import without_unknown_keys
from tasks.mlflow_client import tracking_uri_of
from tasks.night_state import CONFIG, RUNS
from training.contract import read_json
from training.errors import ContractError

_PLACE = ("model", "tracking_uri", "experiment", "artifact_location")


class NoNightYet(NightjarError):
    """The home has seen no night, or none of this chain: what was deployed an hour ago has nothing to show."""


@dataclass(frozen=True)
class KnownChain:
    """A chain of nights: its name, its newest night with a readable config, and where that one's versions are kept."""

    name: str
    night: str
    registry: RegistryConfig

    @property
    def sentence(self) -> str:
        """The chain and its model."""
        return f"{self.name} (model {self.registry.model})"


def chains_of(home: Path) -> list[KnownChain]:
    """Every chain of the home, the one that ran last at the end."""
    folders = sorted(_night_folders(home), key=_number, reverse=True)
    newest: dict[str, tuple[float, KnownChain]] = {}
    for folder in folders:
        name = folder.name.rpartition("-")[0]
        registry = None if name in newest else _registry_of(folder)
        if registry is not None:
            newest[name] = ((folder / CONFIG).stat().st_mtime, KnownChain(name, folder.name, registry))
    return [chain for _, chain in sorted(newest.values(), key=lambda found: found[0])]


def chosen(home: Path, chain: str | None, model: str | None) -> list[KnownChain]:
    """The chains that are meant: those of this name and this registered model, as far as given.

    Raises NoNightYet when there has been none, NightjarError naming what there is when none fits or can be read.
    """
    known = chains_of(home)
    if not any(chain in (None, one.name) for one in known):
        _check_readable(home, chain if known else None)
    if not known:
        raise NoNightYet(
            f"home {home} has seen no night yet",
            "run one with `nightjar run CONFIG`, or name the right home with --home or NIGHTJAR_HOME",
        )
    found = [one for one in known if chain in (None, one.name) and model in (None, one.registry.model)]
    if not found:
        wanted = " and ".join(
            f"{what} {name!r}" for what, name in (("chain", chain), ("model", model)) if name is not None
        )
        is_new = chain is not None and all(chain != one.name for one in known)
        kind = NoNightYet if is_new else NightjarError
        raise kind(f"home {home} has no {wanted}", f"it holds {_sentences(known)}")
    return found


def only_one(home: Path, found: Sequence[KnownChain]) -> KnownChain:
    """The chain, when there is one. Raises NightjarError naming all of them otherwise: none is guessed."""
    if len(found) > 1:
        raise NightjarError(
            f"home {home} holds {len(found)} chains: {_sentences(found)}", "name the one that is meant with --chain"
        )
    return found[0]


def only_place(home: Path, found: Sequence[KnownChain]) -> RegistryConfig:
    """Where the versions of these chains are kept, when all keep them at the same place. Raises NightjarError."""
    places = {(one.registry.model, tracking_uri_of(home, one.registry.tracking_uri)) for one in found}
    experiments = {one.registry.experiment for one in found}
    return (found[-1] if len(places) == len(experiments) == 1 else only_one(home, found)).registry


def _check_readable(home: Path, chain: str | None) -> None:
    """Nights of which none can be read are damage, and not the same as no nights. Raises NightjarError."""
    names = sorted(folder.name for folder in _night_folders(home) if chain in (None, folder.name.rpartition("-")[0]))
    if names:
        whose = "its" if chain is None else f"chain {chain}'s"
        raise NightjarError(
            f"home {home}: no {CONFIG} of {whose} {len(names)} nights can be read, {names[-1]}'s neither",
            f"restore {home / RUNS} from a backup",
        )


def _night_folders(home: Path) -> Iterator[Path]:
    for file in (home / RUNS).glob(f"*/{CONFIG}"):
        name, dash, number = file.parent.name.rpartition("-")
        if name and dash and number.isdecimal():
            yield file.parent


def _number(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def _registry_of(folder: Path) -> RegistryConfig | None:
    """The section `registry` of a night's config; of one that no longer fits the schema, the place alone."""
    try:
        content: Any = read_json(folder / CONFIG)
        section = dict(content["registry"])
    except (ContractError, KeyError, TypeError, ValueError):
        return None
    for kept in (section, {key: section[key] for key in _PLACE if key in section}):
        try:
            return without_unknown_keys(RegistryConfig, kept)
        except ValidationError:
            continue
    return None


def _sentences(chains: Sequence[KnownChain]) -> str:
    return ", ".join(one.sentence for one in chains)
