"""A home that was moved: embedded MLflow keeps absolute places of its artifacts, and would write to the old one."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from tasks.mlflow_client import ARTIFACTS, is_embedded
from tasks.registry import answering
from tasks.registry_errors import RegistryError
from tasks.site import Site


def check_home_in_place(site: Site) -> None:
    """The artifacts of this home's experiment are reachable where MLflow looks for them. Raises RegistryError.

    A link at the old place is enough. With a server there is nothing to check: it knows where its artifacts are.
    """
    if not is_embedded(site.home, site.tracking_uri):
        return
    with answering(site.tracking_uri):
        experiment = site.registry.client.get_experiment_by_name(site.config.experiment)
    place = urlsplit(experiment.artifact_location) if experiment is not None else None
    if place is None or place.scheme not in ("", "file"):
        return
    old, here = Path(unquote(place.path)), site.home.resolve() / ARTIFACTS
    if old != here and not old.exists():
        raise RegistryError(
            f"home {site.home} was moved: MLflow looks for its artifacts in {old}, which is gone",
            f"leave a link where the home was: ln -s {site.home.resolve()} {old.parent}",
        )
