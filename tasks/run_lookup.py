"""Finding the experiment and runs of a night by what is written on them, or making them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tasks.mlflow_client import ARTIFACTS, is_embedded
from tasks.registry import answering
from tasks.registry_errors import RegistryError
from tasks.run_tags import HOME, NIGHT_NAME, STAGE, home_id
from tasks.site import Site

if TYPE_CHECKING:
    from mlflow.entities import Run

WHOLE_NIGHT = "night"
"""The `stage` of a night's parent run."""


def experiment_of(site: Site) -> str:
    """The experiment's identifier; made with the home's artifact folder when MLflow is embedded."""
    client, name = site.registry.client, site.config.experiment
    with answering(site.tracking_uri):
        found = client.get_experiment_by_name(name)
    if found is None:
        place = site.config.artifact_location
        if place is None and is_embedded(site.home, site.tracking_uri):
            place = (site.home.resolve() / ARTIFACTS).as_uri()
        try:
            with answering(site.tracking_uri):
                return str(client.create_experiment(name, artifact_location=place))
        except RegistryError:  # another night was faster; anything else shows again below
            found = client.get_experiment_by_name(name)
    if found is None or found.lifecycle_stage != "active":
        raise RegistryError(
            f"experiment {name!r} was deleted in MLflow", "restore it there, or choose another registry.experiment"
        )
    return str(found.experiment_id)


def night_tags(site: Site, night: str, stage: str) -> dict[str, str]:
    return {HOME: home_id(site.home), NIGHT_NAME: night, STAGE: stage}


def find_or_create_run(site: Site, experiment: str, night: str, stage: str, more: Mapping[str, str]) -> str:
    """A run by its tags: a process that died between creating it and remembering it leaves no double."""
    tags = night_tags(site, night, stage) | dict(more)
    condition = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
    with answering(site.tracking_uri):
        found: list[Run] = list(site.registry.client.search_runs([experiment], condition, max_results=1))
        if found:
            return str(found[0].info.run_id)
        name = night if stage == WHOLE_NIGHT else stage
        return str(site.registry.client.create_run(experiment, tags=tags, run_name=name).info.run_id)


def run_exists(site: Site, run_id: str) -> bool:
    """Whether this store knows the run (it does not when the night moved to another server)."""
    try:
        with answering(site.tracking_uri):
            site.registry.client.get_run(run_id)
    except RegistryError:
        return False
    return True
