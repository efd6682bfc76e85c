"""Checkpoints that survive a kill at any byte: written under a temporary name, fsynced, renamed, hashed.

checkpoints/step_00000012/  tensors.safetensors  state.json  manifest.json (sha256 of the other two, written last)
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from training.contract import fsync_folder, sha256_file
from training.errors import CheckpointError

_TENSORS, _STATE, _MANIFEST = "tensors.safetensors", "state.json", "manifest.json"
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """A point to go on from. `tensors` are flat names; `state` is JSON: counters, RNG states, controller states."""

    step: int
    tensors: dict[str, torch.Tensor]
    state: dict[str, Any]


class CheckpointFolder:
    """The checkpoints of one stage, newest last. `keep` of them stay, besides those that are pinned."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep
        self.refused: list[str] = []

    def save(self, step: int, tensors: Tensors, state: Mapping[str, Any], pinned: tuple[int, ...] = ()) -> Path:
        """Write a checkpoint. Raises CheckpointError when the disk refuses; the one before it is then untouched.

        Those of later steps go: they are torn, or of a run that was given up.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        target = self._path(step)
        temporary = self.folder / f".{target.name}.{os.getpid()}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir()
            self._fill(temporary, tensors, state)
            if target.exists():
                self._remove(target)
            os.rename(temporary, target)
            fsync_folder(self.folder)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{target}: not written: {error}", "free disk space and run again; the checkpoint before it is intact"
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self._forget(step, pinned)
        return target

    def latest(self, up_to: int | None = None) -> Checkpoint | None:
        """The newest checkpoint whose hashes hold; torn or tampered ones are refused and listed in `refused`.

        `up_to`: the last step to look at.
        """
        self.refused = []
        for path in reversed(list(self._paths())):
            if up_to is not None and _step_of(path) > up_to:
                continue
            try:
                return self._read(path)
            except CheckpointError as error:
                self.refused.append(str(error))
        return None

    def at(self, step: int) -> Checkpoint:
        """The checkpoint of one step. Raises CheckpointError when it is not there or not whole."""
        return self._read(self._path(step))

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, oldest first."""
        return [_step_of(path) for path in self._paths()]

    def _fill(self, folder: Path, tensors: Tensors, state: Mapping[str, Any]) -> None:
        save_file({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, folder / _TENSORS)
        (folder / _STATE).write_text(json.dumps(state, sort_keys=True, allow_nan=True), encoding="utf-8")
        hashes = {name: sha256_file(folder / name) for name in (_TENSORS, _STATE)}
        (folder / _MANIFEST).write_text(json.dumps(hashes, sort_keys=True), encoding="utf-8")
        for file in folder.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        fsync_folder(folder)

    def _read(self, path: Path) -> Checkpoint:
        try:
            hashes = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
            for name in (_TENSORS, _STATE):
                if sha256_file(path / name) != hashes[name]:
                    raise CheckpointError(f"{path / name}: sha256 differs from the manifest; not used")
            state = json.loads((path / _STATE).read_text(encoding="utf-8"))
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: not a whole checkpoint: {error}") from None
        return Checkpoint(_step_of(path), load_file(path / _TENSORS), state)

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def _paths(self) -> Iterator[Path]:
        yield from sorted(self.folder.glob("step_" + "[0-9]" * 8))

    def _forget(self, saved: int, pinned: tuple[int, ...]) -> None:
        """Keep the newest up to the one saved just now, and those pinned."""
        past = [step for step in self.steps() if step <= saved]
        for step in {*self.steps()} - {*past[-self.keep :], *pinned}:
            self._remove(self._path(step))
        for leftover in self.folder.glob(".step_*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _remove(self, path: Path) -> None:
        """Out of sight first: a kill half-way leaves no checkpoint that bears its name and lacks a file. The next save
        clears what is left of it."""
        aside = self.folder / f".{path.name}.{os.getpid()}.old.tmp"
        with suppress(OSError):
            os.rename(path, aside)
        shutil.rmtree(aside, ignore_errors=True)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def prefixed(prefix: str, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Put a group's name in front of its tensors' names."""
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def group(prefix: str, tensors: Tensors) -> dict[str, torch.Tensor]:
    """The tensors of one group, without its name."""
    return {name.removeprefix(f"{prefix}/"): t for name, t in tensors.items() if name.startswith(f"{prefix}/")}
