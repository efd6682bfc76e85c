"""What a home knows of a chain without its YAML: the config it was last run with, and its registered model.

`chain` and `model` choose among several chains of one home; with one chain neither is needed. Nothing is guessed: a
command that takes down a champion must never take down that of another chain because it happened to run last.
"""

from __future__ import annotations

from pathlib import Path

from configs.schema import NightConfig
from tasks.chains import chains_of, chosen, only_one, only_place
from tasks.night_state import NightBook
from tasks.site import Site


def last_config(home: Path, chain: str | None = None, model: str | None = None) -> NightConfig:
    """The effective config of the chain's newest night.

    Raises NightjarError when the home has seen no such night, or holds several chains and does not say which.
    """
    return NightBook(home).config(only_one(home, chosen(home, chain, model)).night)


def site_of(home: Path, chain: str | None = None, model: str | None = None) -> Site:
    """The registered model of the chain, by its last config. Raises as `last_config`.

    Chains that share model, server and experiment need not be told apart.
    """
    return Site.open(home, only_place(home, chosen(home, chain, model)))


def sites_of(home: Path) -> list[Site]:
    """Every registered model of this home, the one that was worked on last at the end. Raises when there is none."""
    chosen(home, None, None)
    sites = {}
    for chain in chains_of(home):
        site = Site.open(home, chain.registry)
        sites[site.model, site.tracking_uri] = site
    return list(sites.values())
