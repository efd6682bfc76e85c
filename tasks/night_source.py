"""The night's data before it is validated: where it lies, what brings it, and its fingerprint."""

from __future__ import annotations

from pathlib import Path

from configs.schema import NightConfig
from tasks.night import Source


def source_uri(config: NightConfig, home: Path) -> str:
    """Where the validate stage reads: the config's source, or the folder that the generator writes to."""
    if config.data.source is not None:
        return config.data.source
    return str(home / "quickstart" / f"{config.name}-seed{config.seed}")


def source_of(config: NightConfig, home: Path) -> Source:
    """How `open_night` sees the data. Only the built-in generator delivers; other data arrives by itself."""
    from training.data.reading import source_digest  # brings pyarrow, which `nightjar validate` does without

    uri = source_uri(config, home)
    return Source(deliver=lambda index: _deliver(config, Path(uri), index), fingerprint=lambda: source_digest(uri))


def check_source(config: NightConfig) -> None:
    """The source is there, and its first rows can be trained on. Raises DataError. The generator delivers later."""
    from training.data.look import look_at

    if config.data.source is not None:
        look_at(config.data)


def _deliver(config: NightConfig, folder: Path, index: int) -> None:
    from training.data.quickstart import deliver

    if config.data.quickstart is not None:
        deliver(folder, index - 1, config.data.quickstart, config.seed)
