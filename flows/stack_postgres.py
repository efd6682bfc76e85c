"""PostgreSQL from the system's own binaries, below one folder, on loopback, never as root."""

from __future__ import annotations

import glob
import os
import pwd
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import NightjarError

BIN = "NIGHTJAR_POSTGRES_BIN"
"""Environment variable: folder of postgres, initdb, psql, pg_isready, where they are not found by themselves."""
ROLE = "nightjar"
_DEBIAN = "/usr/lib/postgresql/*/bin"
_OLDEST = 14
_UNPRIVILEGED = ("postgres", "nobody")
_SECONDS = 120


@dataclass(frozen=True)
class Postgres:
    """A cluster: its binaries, its data folder, its port on loopback, its password, and whom it runs as."""

    binaries: Path
    data: Path
    port: int
    password: str
    user: str | None

    @property
    def command(self) -> list[str]:
        """The server in the foreground: TCP on loopback, no socket file in a shared folder."""
        settings = {"listen_addresses": "127.0.0.1", "port": str(self.port), "unix_socket_directories": ""}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [str(self.binaries / "postgres"), "-D", str(self.data), *options]

    def url(self, driver: str, database: str) -> str:
        """SQLAlchemy's address of a database. Holds the password: for environments only, never for a command line."""
        return f"postgresql+{driver}://{ROLE}:{self.password}@127.0.0.1:{self.port}/{database}"

    def answers(self) -> bool:
        """Whether it takes connections."""
        asked = [str(self.binaries / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port), "-d", "postgres"]
        return subprocess.run(asked, check=False, timeout=10, capture_output=True).returncode == 0

    def initialise(self) -> None:
        """Make the cluster when there is none. Raises NightjarError."""
        if (self.data / "PG_VERSION").is_file():
            return
        with tempfile.NamedTemporaryFile("w", dir=self.data.parent, prefix=".password-") as file:
            file.write(self.password)
            file.flush()
            if self.user is not None:
                os.chown(file.name, pwd.getpwnam(self.user).pw_uid, -1)
            command = [
                str(self.binaries / "initdb"), "-D", str(self.data), "-U", ROLE, "--auth=scram-sha-256",
                f"--pwfile={file.name}", "--encoding=UTF8", "--locale=C",
            ]  # fmt: skip
            done = subprocess.run(
                command, check=False, timeout=_SECONDS, capture_output=True, text=True, cwd="/", **as_user(self.user)
            )
        if done.returncode != 0:
            raise NightjarError(f"initdb failed in {self.data}: {(done.stderr or done.stdout).strip()[-500:]}")

    def ensure_databases(self, names: Sequence[str]) -> None:
        """Create the databases that are missing. The server must answer. Raises NightjarError."""
        for name in names:
            if self._ask(f"SELECT 1 FROM pg_database WHERE datname = '{name}'") != "1":
                self._ask(f'CREATE DATABASE "{name}"')

    def _ask(self, statement: str) -> str:
        command = [
            str(self.binaries / "psql"), "-h", "127.0.0.1", "-p", str(self.port), "-U", ROLE, "-d", "postgres",
            "-tAXc", statement,
        ]  # fmt: skip
        environment = {"PGPASSWORD": self.password, "PGCONNECT_TIMEOUT": "10", "PATH": os.environ.get("PATH", "")}
        done = subprocess.run(
            command, check=False, timeout=_SECONDS, capture_output=True, text=True, env=environment, cwd="/"
        )
        if done.returncode != 0:
            raise NightjarError(f"PostgreSQL on port {self.port} refuses: {done.stderr.strip()[-300:]}")
        return done.stdout.strip()


def open_postgres(folder: Path, port: int) -> Postgres:
    """The cluster of this stack: found where it was, made where it is not. Raises NightjarError."""
    user = unprivileged_user()
    data = data_folder(folder, user)
    cluster = Postgres(find_binaries(), data, port, _password(folder), user)
    cluster.initialise()
    return cluster


def find_binaries() -> Path:
    """The newest PostgreSQL here that Prefect's server works with. Raises NightjarError with the way out."""
    chosen = os.environ.get(BIN)
    if chosen:
        places = [Path(chosen)]
    else:
        debian = [Path(found) for found in glob.glob(_DEBIAN)]
        on_path = shutil.which("postgres")
        places = sorted(debian, key=_version, reverse=True) + ([Path(on_path).resolve().parent] if on_path else [])
    for place in places:
        complete = all((place / name).is_file() for name in ("postgres", "initdb", "psql", "pg_isready"))
        if complete and _version(place) >= _OLDEST:
            return place
    looked = ", ".join(str(place) for place in places) or f"{_DEBIAN} and PATH"
    raise NightjarError(
        f"no PostgreSQL {_OLDEST} or newer found (looked at {looked})",
        f"install it (Debian: apt install postgresql), or set {BIN} to the folder of its binaries",
    )


def _version(binaries: Path) -> int:
    """Major version: from Debian's folder, else from the program; 0 when it does not say."""
    named = re.fullmatch(r"\d+", binaries.parent.name)
    if named:
        return int(named[0])
    try:
        said = subprocess.run([str(binaries / "postgres"), "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return 0
    found = re.search(r"(\d+)\.\d+", said.stdout)
    return int(found[1]) if found else 0


def unprivileged_user() -> str | None:
    """Whom to run PostgreSQL as: None for this user, a system user when this is root, as which it refuses to run."""
    if os.geteuid() != 0:
        return None
    for name in _UNPRIVILEGED:
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    raise NightjarError("PostgreSQL does not run as root, and there is no other user here", "add a user `postgres`")


def as_user(user: str | None) -> dict[str, Any]:
    """Arguments of subprocess that give every right away but those of `user`."""
    if user is None:
        return {}
    entry = pwd.getpwnam(user)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


def data_folder(folder: Path, user: str | None) -> Path:
    """An empty or used data folder that `user` owns and can reach: below `folder`, else below /var/tmp."""
    noted = folder / "postgres.place"
    if noted.is_file():
        return Path(noted.read_text(encoding="utf-8").strip())
    place = folder / "postgres"
    if not _made_for(place, user):
        # The home lies where only root may go.
        place.rmdir()
        place = Path(tempfile.mkdtemp(prefix="nightjar-postgres-", dir="/var/tmp")) / "postgres"
        place.parent.chmod(0o711)
        if not _made_for(place, user):
            raise NightjarError(f"user {user} can reach neither {folder} nor /var/tmp", "set NIGHTJAR_HOME elsewhere")
    noted.write_text(str(place), encoding="utf-8")
    return place


def _made_for(place: Path, user: str | None) -> bool:
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if user is None:
        return True
    entry = pwd.getpwnam(user)
    os.chown(place, entry.pw_uid, entry.pw_gid)
    reached = subprocess.run(["/bin/sh", "-c", 'cd "$0"', str(place)], check=False, cwd="/", stderr=subprocess.DEVNULL,
                             **as_user(user))  # fmt: skip
    return reached.returncode == 0


def _password(folder: Path) -> str:
    """This stack's own, readable by this user alone."""
    file = folder / "postgres.password"
    if not file.is_file():
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(secrets.token_urlsafe(24))
    return file.read_text(encoding="utf-8").strip()
