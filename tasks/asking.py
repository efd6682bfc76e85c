"""Asking a registered version, as a person does: its stored bytes are checked before anything of it is run."""

from __future__ import annotations

import re
from dataclasses import replace

from configs.errors import NightjarError
from tasks.registry import ModelRegistry, Version
from tasks.registry_errors import RegistryError
from tasks.site import Site

_ADDRESS = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<number>\d+))")


def ask(site: Site, address: str, prompt: str, max_new_tokens: int) -> str:
    """The answer of the version at `address` (models:/NAME@alias or models:/NAME/3) in the registry of `site`.

    Raises NightjarError for no address, RegistryError where there is no such version, StoredBytesDiffer when what is
    stored is not what a night has uploaded, ServingError when it does not answer.
    """
    here, version = _at(site, address)
    with here.unchanged(version) as stored, here.worker() as worker:
        return worker.answer(str(stored), [prompt], max_new_tokens).texts[0]


def _at(site: Site, address: str) -> tuple[Site, Version]:
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise NightjarError(
            f"--model {address} is not a registry address", "write models:/NAME@champion or models:/NAME/3"
        )
    named = site.config.model_copy(update={"model": match["name"]})
    here = replace(site, config=named, registry=ModelRegistry(match["name"], site.tracking_uri))
    number = match["number"] or here.registry.alias(match["alias"])
    if number is None:
        raise RegistryError(f"{match['name']} has no version with the alias {match['alias']}")
    return here, here.registry.version(number)
