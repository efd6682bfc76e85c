"""PostgreSQL of the native stack: which binaries, as whom, and a real server on loopback with a password."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.errors import NightjarError
from flows import stack_postgres
from flows.stack_postgres import (
    BIN,
    Postgres,
    as_user,
    data_folder,
    find_binaries,
    open_postgres,
    unprivileged_user,
)
from tasks.launch_plan import free_port


@pytest.fixture(scope="module", autouse=True)
def prefect_server() -> None:
    """None is needed here."""


def has_postgres() -> bool:
    try:
        find_binaries()
    except NightjarError:
        return False
    return True


real = pytest.mark.skipif(not has_postgres(), reason="no PostgreSQL 14 or newer on this machine")


def fake_binaries(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("postgres", "initdb", "psql", "pg_isready"):
        (folder / name).touch(mode=0o755)
    return folder


def test_the_newest_of_debian_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BIN, raising=False)
    monkeypatch.setattr(stack_postgres, "_DEBIAN", str(tmp_path / "*/bin"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(NightjarError, match="apt install postgresql"):
        find_binaries()
    fake_binaries(tmp_path / "9/bin")
    with pytest.raises(NightjarError, match="no PostgreSQL 14 or newer"):
        find_binaries()
    fake_binaries(tmp_path / "15/bin")
    fake_binaries(tmp_path / "100/bin")
    assert find_binaries() == tmp_path / "100/bin", "numbers, not letters, are compared"
    (tmp_path / "100/bin/initdb").unlink()
    assert find_binaries() == tmp_path / "15/bin", "a client's package is no server"


def test_a_named_folder_wins_and_is_not_replaced_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BIN, str(tmp_path / "nowhere"))
    with pytest.raises(NightjarError, match="nowhere"):
        find_binaries()
    monkeypatch.setenv(BIN, str(fake_binaries(tmp_path / "16/bin")))
    assert find_binaries() == tmp_path / "16/bin"


def test_root_gives_its_rights_away_and_others_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert unprivileged_user() is None
    assert as_user(None) == {}
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    user = unprivileged_user()
    assert user is not None
    assert as_user(user)["user"] != 0
    assert as_user(user)["extra_groups"] == []

    def nobody(name: str) -> None:
        raise KeyError(name)

    monkeypatch.setattr(pwd, "getpwnam", nobody)
    with pytest.raises(NightjarError, match="does not run as root"):
        unprivileged_user()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may have a home that others cannot reach")
def test_a_home_that_only_root_reaches_gets_its_data_elsewhere(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    place = data_folder(closed, unprivileged_user())
    try:
        assert place.is_relative_to("/var/tmp")
        assert data_folder(closed, unprivileged_user()) == place, "found again"
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
    finally:
        shutil.rmtree(place.parent)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Postgres]:
    folder = Path(tempfile.mkdtemp(prefix="nightjar-test-"))
    folder.chmod(0o711)
    made = open_postgres(folder, free_port())
    process = subprocess.Popen(made.command, cwd="/", stderr=subprocess.DEVNULL, **as_user(made.user))
    deadline = time.monotonic() + 60
    while not made.answers():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    yield made
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    shutil.rmtree(folder)


@real
def test_it_answers_on_loopback_alone_and_makes_what_is_missing(cluster: Postgres) -> None:
    cluster.ensure_databases(["one", "two"])
    cluster.ensure_databases(["two", "three"])
    names = cluster._ask("SELECT string_agg(datname, ',' ORDER BY datname) FROM pg_database WHERE NOT datistemplate")
    assert names == "one,postgres,three,two"
    assert cluster._ask("SHOW listen_addresses") == "127.0.0.1"
    assert cluster._ask("SHOW unix_socket_directories") == ""
    owner = cluster.data.stat().st_uid
    assert owner != 0
    with socket.create_connection(("127.0.0.1", cluster.port), timeout=5):
        pass


@real
def test_nobody_gets_in_without_the_password(cluster: Postgres) -> None:
    stranger = Postgres(cluster.binaries, cluster.data, cluster.port, "guessed", cluster.user)
    with pytest.raises(NightjarError, match="password authentication failed") as refused:
        stranger.ensure_databases(["mine"])
    assert "guessed" not in str(refused.value)
    assert cluster.password not in " ".join(cluster.command)
    password_file = cluster.data.parent / "postgres.password"
    assert stat.S_IMODE(password_file.stat().st_mode) == 0o600
    assert cluster.url("asyncpg", "prefect").startswith("postgresql+asyncpg://nightjar:")


@real
def test_opening_it_again_finds_the_same_cluster(cluster: Postgres) -> None:
    again = open_postgres(cluster.data.parent, cluster.port)
    assert again == cluster
