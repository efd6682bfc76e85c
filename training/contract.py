"""The seam between the night and a stage: a directory with spec.json and, when it is done, result.json.

Success is a valid result.json whose hashes match, never an exit code. Torch-free.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from configs.schema.base import Section
from training.errors import ContractError

SPEC = "spec.json"
RESULT = "result.json"
METRICS = "metrics.jsonl"
LOG = "log.txt"
LEASE = "lease"
CHECKPOINTS = "checkpoints"
GOOD_STATES = "good_states"

PLACES = ("store",)
"""Params that only say where something lies: content decides a result, not its place."""

AnySection = TypeVar("AnySection", bound=Section)


@dataclass(frozen=True)
class FileRef:
    """A file or folder by place and content. `sha256` of a folder covers relative names and contents."""

    path: str
    sha256: str
    size: int

    def verify(self) -> None:
        """Raise ContractError when the place no longer holds that content."""
        found = file_ref(Path(self.path))
        if found.sha256 != self.sha256:
            raise ContractError(
                f"{self.path}: content changed (sha256 {found.sha256[:12]}, expected {self.sha256[:12]})"
            )


@dataclass(frozen=True)
class StageSpec:
    """Everything a stage needs to run, alone and by hand.

    `config`: the sections it reads, by name; `inputs`: files by role; `params`: small facts that are part of the key.
    """

    stage: str
    night: str
    home: str
    seed: int
    config: Mapping[str, Any]
    inputs: Mapping[str, FileRef] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    code_version: str = ""

    @property
    def key(self) -> str:
        """sha256 of what decides the result: config sections, input digests, params, seed and code version."""
        content = {
            "stage": self.stage,
            "seed": self.seed,
            "config": self.config,
            "inputs": {role: ref.sha256 for role, ref in self.inputs.items()},
            "params": {name: value for name, value in self.params.items() if name not in PLACES},
            "code_version": self.code_version,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def section(self, name: str, kind: type[AnySection]) -> AnySection:
        """The typed section `name` of the config."""
        if name not in self.config:
            raise ContractError(f"spec of stage {self.stage}: config has no section {name!r}")
        return kind.model_validate(self.config[name])


@dataclass(frozen=True)
class StageResult:
    """The completion manifest of a stage."""

    stage: str
    key: str
    outputs: Mapping[str, FileRef]
    metrics: Mapping[str, float | None]
    facts: Mapping[str, Any]
    wall_seconds: float
    versions: Mapping[str, str]

    def output(self, role: str) -> FileRef:
        """The output `role`; raises ContractError naming what there is."""
        if role not in self.outputs:
            raise ContractError(f"stage {self.stage} has no output {role!r}; it has {', '.join(sorted(self.outputs))}")
        return self.outputs[role]


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def file_ref(path: Path) -> FileRef:
    """Describe a file or folder. Raises ContractError when there is none."""
    if path.is_file():
        return FileRef(str(path), sha256_file(path), path.stat().st_size)
    if not path.is_dir():
        raise ContractError(f"{path}: no such file or folder")
    digest, size = hashlib.sha256(), 0
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        digest.update(f"{file.relative_to(path).as_posix()}\0{sha256_file(file)}\n".encode())
        size += file.stat().st_size
    return FileRef(str(path), digest.hexdigest(), size)


def write_json(path: Path, content: Any) -> None:
    """Write JSON so that a reader sees the old file or the whole new one: temporary name, fsync, rename, fsync."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            json.dump(content, stream, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def json_of(text: str) -> Any:
    """Parse JSON; raises ValueError or RecursionError, also for half a surrogate pair, which no text can hold."""
    content = json.loads(text)
    if "\\ud" in text.lower():
        json.dumps(content, ensure_ascii=False).encode()
    return content


def read_json(path: Path) -> Any:
    """Read JSON; raises ContractError naming the file, whatever is in it."""
    try:
        return json_of(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ContractError(f"{path}: missing") from None
    except OSError as error:
        raise ContractError(f"{path}: cannot be read: {error.strerror or error}") from None
    except RecursionError:
        raise ContractError(f"{path}: not valid JSON: nested too deep") from None
    except ValueError as error:  # not JSON, not UTF-8, or a number with thousands of digits
        raise ContractError(f"{path}: not valid JSON: {error}") from None


def write_spec(directory: Path, spec: StageSpec) -> None:
    """Write spec.json, making the stage directory."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / SPEC, asdict(spec) | {"key": spec.key})


def read_spec(directory: Path) -> StageSpec:
    """Read spec.json. Raises ContractError naming what is missing."""
    content = read_json(directory / SPEC)
    try:
        content.pop("key", None)
        inputs = {role: FileRef(**ref) for role, ref in content.pop("inputs").items()}
        return StageSpec(inputs=inputs, **content)
    except (KeyError, TypeError, AttributeError) as error:
        raise ContractError(f"{directory / SPEC}: not a stage spec: {error}") from None


def write_result(directory: Path, result: StageResult) -> None:
    """Write result.json last: its presence says the stage is complete."""
    write_json(directory / RESULT, asdict(result))


def read_result(directory: Path) -> StageResult:
    """Read result.json without checking hashes."""
    content = read_json(directory / RESULT)
    try:
        outputs = {role: FileRef(**ref) for role, ref in content.pop("outputs").items()}
        return StageResult(outputs=outputs, **content)
    except (KeyError, TypeError, AttributeError) as error:
        raise ContractError(f"{directory / RESULT}: not a stage result: {error}") from None


def valid_result(directory: Path, key: str) -> StageResult | None:
    """The result when it is complete, of this key, and every output still has its hash; None otherwise."""
    try:
        result = read_result(directory)
        if result.key != key:
            return None
        for ref in result.outputs.values():
            ref.verify()
    except ContractError:
        return None
    return result
