#!/usr/bin/env python3
"""Carry out a Dockerfile without a container engine: each of its instructions, in a clean root of Debian's packages.

    sudo python3 docker/check_image.py cpu /var/tmp/image [--bind PATH ...]

The base is not the image that FROM names, but Debian bookworm made by debootstrap, with its Python 3.11. All else is
the Dockerfile's own: ARG, ENV, WORKDIR, COPY, RUN, USER, from the first stage to the last. At the end the image's user
validates a config and drills a promotion with what was installed. Needs root, debootstrap, a package index; 6 GB in
FOLDER, which is removed unless --keep is given. TORCH_INDEX_URL and PIP_ variables are handed on; --bind shows a file
or folder of this machine in the root as well (pip's configuration, certificates).
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
SUITE, PACKAGES = "bookworm", "python3,python3-venv,ca-certificates"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NOT_COPIED = shutil.ignore_patterns("__pycache__", "*.pyc")
USES = (
    "nightjar validate /check/configs/quickstart.yaml",
    "nightjar drill",
    "prefect version",
    "python -c 'import flows, sys; assert \"site-packages\" in flows.__file__, flows.__file__; print(sys.version)'",
)


@dataclass
class Stage:
    """What one FROM begins: its root, and what holds for the commands that follow."""

    root: Path
    name: str
    environment: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0:0"

    def run(self, command: str, binds: Sequence[str]) -> None:
        """One command in the root. Raises CalledProcessError."""
        print(f"  {self.user} {command[:100]}", flush=True)
        handed = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        environment = {"PATH": PATH, "HOME": "/tmp"} | handed | self.environment
        with Mounted(self.root, binds):
            inside = f"cd {shlex.quote(self.folder)} && {command}"
            subprocess.run(
                ["chroot", f"--userspec={self.user}", str(self.root), "sh", "-ec", inside], env=environment, check=True
            )

    def inside(self, path: str) -> Path:
        """Where that path of the image lies on this machine."""
        return self.root / os.path.join(self.folder, path).lstrip("/")


class Mounted:
    """/proc, /dev and the files to show, while a command runs. In a mount namespace of this script's own."""

    def __init__(self, root: Path, binds: Sequence[str]) -> None:
        self._mounts = [(place, root / place.lstrip("/")) for place in ("/proc", "/dev", *binds)]

    def __enter__(self) -> None:
        for source, target in self._mounts:
            if Path(source).is_dir():
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.touch()
            subprocess.run(["mount", "--rbind", source, str(target)], check=True)

    def __exit__(self, *error: object) -> None:
        for _, target in reversed(self._mounts):
            subprocess.run(["umount", "--recursive", "--lazy", str(target)], check=True)


def instructions(dockerfile: Path) -> Iterator[tuple[str, str]]:
    """(instruction, the rest), comments left out and continued lines joined."""
    lines = [line for line in dockerfile.read_text().splitlines() if line.strip() and not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, rest = line.strip().partition(" ")
        yield name, rest.strip()


def build(dockerfile: Path, folder: Path, binds: Sequence[str]) -> Stage:
    """Every stage; the last one, as the image would be."""
    base = folder / "base"
    subprocess.run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(base)], check=True)
    shutil.copy("/etc/resolv.conf", base / "etc/resolv.conf")
    stages: list[Stage] = []
    for name, rest in instructions(dockerfile):
        if name == "FROM":
            stages.append(begun(base, folder, len(stages), rest))
        else:
            follow(stages, name, rest, binds)
    return stages[-1]


def begun(base: Path, folder: Path, number: int, rest: str) -> Stage:
    """A fresh copy of the base."""
    image, _, name = rest.partition(" AS ")
    print(f"FROM {image}: Debian {SUITE} in its place", flush=True)
    root = folder / f"stage{number}"
    subprocess.run(["cp", "-a", str(base), str(root)], check=True)
    return Stage(root, name)


KNOWN = ("ARG", "ENV", "WORKDIR", "USER", "COPY", "RUN")
LEFT_OUT = ("HEALTHCHECK", "CMD", "VOLUME")
"""An engine's business."""


def follow(stages: list[Stage], name: str, rest: str, binds: Sequence[str]) -> None:
    """One instruction, in the newest stage."""
    stage = stages[-1]
    if name == "ARG":
        key, _, value = rest.partition("=")
        stage.environment[key] = os.environ.get(key, value.strip('"'))
    elif name == "ENV":
        stage.environment |= dict(word.split("=", 1) for word in expanded(rest, stage.environment))
    elif name == "WORKDIR":
        stage.folder = rest
        stage.inside(".").mkdir(parents=True, exist_ok=True)
    elif name == "USER":
        stage.user = rest
    elif name == "COPY":
        copy(stages, rest.split())
    elif name == "RUN":
        stage.run(rest, binds)
    elif name not in LEFT_OUT:
        raise SystemExit(f"{name} {rest}: this script does not know that instruction")


def expanded(rest: str, environment: Mapping[str, str]) -> list[str]:
    """The words, with $NAME and ${NAME} replaced."""
    known = {"PATH": PATH} | dict(environment)
    for name, value in known.items():
        rest = rest.replace(f"${{{name}}}", value).replace(f"${name}", value)
    return shlex.split(rest)


def copy(stages: list[Stage], words: list[str]) -> None:
    """COPY: a folder's content, or files, from the repository or an earlier stage."""
    stage, source_root = stages[-1], REPOSITORY
    if words[0].startswith("--from="):
        named = words.pop(0).removeprefix("--from=")
        source_root = next(one.root for one in stages if one.name == named)
    *sources, target = words
    for source in sources:
        found = source_root / source.lstrip("/")
        if found.is_dir():
            shutil.copytree(found, stage.inside(target), symlinks=True, ignore=NOT_COPIED, dirs_exist_ok=True)
        else:
            stage.inside(target).mkdir(parents=True, exist_ok=True)
            shutil.copy(found, stage.inside(target))


def use(stage: Stage, binds: Sequence[str]) -> None:
    """What was installed, used by the image's user."""
    shutil.copytree(REPOSITORY / "configs", stage.root / "check/configs", ignore=NOT_COPIED)
    for command in USES:
        stage.run(command, binds)


def remove(folder: Path) -> None:
    """The folder, unless something is still mounted below it: that is this machine's own."""
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    if any(line.split()[1].startswith(f"{folder}/") for line in mounts):
        raise SystemExit(f"something is still mounted below {folder}: nothing was removed")
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", choices=("cpu", "gpu"))
    parser.add_argument("folder", type=Path, help="a folder to make")
    parser.add_argument("--bind", action="append", default=[], metavar="PATH", help="also in the root; repeatable")
    parser.add_argument("--keep", action="store_true", help="leave FOLDER")
    arguments = parser.parse_args()
    if os.environ.get("CHECK_IMAGE_MOUNTS") != "own":  # mounts end with this process, however it ends
        command = ["unshare", "--mount", sys.executable, *sys.argv]
        os.execvpe("unshare", command, os.environ | {"CHECK_IMAGE_MOUNTS": "own"})
    arguments.folder.mkdir(parents=True)
    started = time.monotonic()
    try:
        stage = build(REPOSITORY / f"docker/{arguments.image}.Dockerfile", arguments.folder.resolve(), arguments.bind)
        print(f"built in {time.monotonic() - started:.0f} s; now it is used", flush=True)
        use(stage, arguments.bind)
    finally:
        if not arguments.keep:
            remove(arguments.folder.resolve())
    print(f"docker/{arguments.image}.Dockerfile: every instruction works, in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
