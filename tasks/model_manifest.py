"""What a version is made of, file by file, before it is uploaded and as the artifact store gives it back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tasks.registry_errors import StoredBytesDiffer
from training.contract import sha256_file
from training.errors import ModelFolderError

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_SERVING_CODE = "serving_model.py"
_ADDED_BY_LOADING = "registered_model_meta"
_NAMED = 5


@dataclass(frozen=True)
class ModelFiles:
    """What is stored for a version: `model`, a whole Hugging Face folder that is served, and maybe `adapter`, the
    PEFT folder that training goes on from; it is kept beside, never applied when serving."""

    model: Path
    adapter: Path | None = None

    def by_role(self) -> Mapping[str, Path]:
        """The folders by role; roles are artifact names in MLflow."""
        return {"model": self.model} | ({"adapter": self.adapter} if self.adapter is not None else {})


def check_folder(folder: Path) -> None:
    """Refuse what must not be uploaded: pickles, and links that leave the folder. Raises ModelFolderError."""
    if not folder.is_dir():
        raise ModelFolderError(f"{folder}: no such folder", "promotion stores a folder written by a stage")
    inside = folder.resolve()
    for path in folder.rglob("*"):
        if path.suffix in _PICKLES:
            raise ModelFolderError(f"{path}: pickle files are not stored", "save the weights as safetensors")
        if not path.resolve().is_relative_to(inside):
            raise ModelFolderError(f"{path}: the link leaves the folder", "replace it by the file itself")


def hashes(folder: Path) -> dict[str, str]:
    """sha256 of every file by relative path, except the note that MLflow adds when it loads from a local store."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: sha256_file(files[name]) for name in sorted(files) if name != _ADDED_BY_LOADING}


def whole_sha256(files: Mapping[str, str]) -> str:
    """One sha256 over names and contents, of the output of `hashes`."""
    lines = "".join(f"{name}\0{files[name]}\n" for name in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()


def differences(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """One phrase a file that is missing, additional or changed."""
    missing = [f"{name} is missing" for name in sorted(set(expected) - set(found))]
    extra = [f"{name} was added" for name in sorted(set(found) - set(expected))]
    changed = [f"{name} differs" for name in sorted(set(expected) & set(found)) if expected[name] != found[name]]
    return missing + changed + extra


def check_upload(stored: Path, sources: ModelFiles) -> None:
    """Compare what the store gives back with the files on disk. Raises StoredBytesDiffer naming the files."""
    wrong = []
    for role, source in sources.by_role().items():
        found = hashes(stored_folder(stored, role))
        wrong += [f"{role}/{phrase}" for phrase in differences(hashes(source), found)]
    code = Path(__file__).with_name(_SERVING_CODE)
    if not (stored / _SERVING_CODE).is_file() or sha256_file(stored / _SERVING_CODE) != sha256_file(code):
        wrong.append(f"{_SERVING_CODE} differs")
    if wrong:
        raise _differ("the upload is not what was saved", wrong)


def check_unchanged(stored: Path, expected_sha256: str, expected_files: Mapping[str, str] | None) -> None:
    """Compare everything stored with the hash taken right after the upload. Raises StoredBytesDiffer."""
    files = hashes(stored)
    found = whole_sha256(files)
    if found == expected_sha256:
        return
    wrong = differences(expected_files, files) if expected_files else []
    summary = f"stored bytes have sha256 {found[:12]}, were {expected_sha256[:12]} after the upload"
    raise _differ(summary, wrong)


def stored_folder(stored: Path, role: str) -> Path:
    """Where MLflow put the folder of `role` inside the stored model; always inside it. Raises StoredBytesDiffer."""
    import yaml

    path = "?"
    try:
        meta: Any = yaml.safe_load((stored / "MLmodel").read_text(encoding="utf-8"))
        path = meta["flavors"]["python_function"]["artifacts"][role]["path"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise StoredBytesDiffer(f"{stored / 'MLmodel'}: names no artifact {role!r} ({type(error).__name__})") from None
    pure = PurePosixPath(str(path))
    if pure.is_absolute() or ".." in pure.parts or not (stored / pure).is_dir():
        raise StoredBytesDiffer(f"{stored / 'MLmodel'}: artifact {role!r} lies at {path!r}, outside the stored model")
    return stored / pure


def has_role(stored: Path, role: str) -> bool:
    """Whether the stored model has a folder of that role."""
    try:
        stored_folder(stored, role)
    except StoredBytesDiffer:
        return False
    return True


def _differ(summary: str, phrases: list[str]) -> StoredBytesDiffer:
    shown = ", ".join(phrases[:_NAMED]) + (f" and {len(phrases) - _NAMED} more" if len(phrases) > _NAMED else "")
    return StoredBytesDiffer(
        f"{summary}{': ' + shown if shown else ''}",
        "find out what writes to the artifact store; the version is not promoted, run the night again for a new one",
    )
