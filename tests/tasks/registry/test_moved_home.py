"""A home is moved: refused with the way out, and with a link at the old place all is as before."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.schema.registry import RegistryConfig
from tasks.candidate import fetch_version
from tasks.moved_home import check_home_in_place
from tasks.registry import Version
from tasks.registry_errors import RegistryError
from tasks.site import Site


def moved(site: Site, place: Path) -> Site:
    """The same home at another place."""
    shutil.move(site.home, place)
    return Site.open(place, site.config)


def test_a_moved_home_is_refused_until_a_link_stands_where_it_was(
    site: Site, experiment: str, register: Callable[..., Version], tmp_path: Path
) -> None:
    client, old = site.registry.client, site.home
    run = client.create_run(experiment).info.run_id
    client.log_text(run, "said", "notes/said.txt")
    version = register(1)
    check_home_in_place(site)

    there = moved(site, tmp_path / "elsewhere" / "home")
    assert there.registry.client.list_artifacts(run, "notes") == [], "MLflow finds nothing, and does not say so"
    with pytest.raises(RegistryError, match="was moved") as refused:
        check_home_in_place(there)
    assert f"ln -s {there.home} {old}" in str(refused.value)
    assert not old.exists()

    old.symlink_to(there.home)
    check_home_in_place(there)
    said = there.registry.client.download_artifacts(run, "notes/said.txt")
    assert Path(said).read_text() == "said"
    fetched = fetch_version(there, version.number, tmp_path / "fetched")
    assert (fetched.files.model / "model.safetensors").is_file()


def test_a_new_home_and_one_without_artifacts_yet_are_in_place(site: Site, experiment: str) -> None:
    shutil.rmtree(site.home / "mlartifacts", ignore_errors=True)
    check_home_in_place(site)
    check_home_in_place(Site.open(site.home, RegistryConfig(experiment="another")))


def test_a_servers_artifacts_are_its_own_business(home: Path) -> None:
    check_home_in_place(Site.open(home, RegistryConfig(tracking_uri="http://127.0.0.1:9")))
