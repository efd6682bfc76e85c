"""Small frozen records that go to disk as strict JSON and come back unchanged, NaN and infinities included."""

from __future__ import annotations

import hashlib
import json
import math
import numbers
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, ValidationError

from training.contract import write_json
from training.errors import GateError

_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _read_number(given: Any) -> Any:
    if isinstance(given, str) and given in _WORDS:
        return _WORDS[given]
    if isinstance(given, numbers.Real) and not isinstance(given, bool):
        try:
            return float(given)
        except OverflowError:
            raise ValueError("a number beyond the range of a float") from None
    return given


def _write_number(value: float) -> float | str:
    if math.isnan(value):
        return "nan"
    return value if math.isfinite(value) else ("inf" if value > 0 else "-inf")


Number = Annotated[float, BeforeValidator(_read_number), PlainSerializer(_write_number, when_used="json")]
"""A float; in JSON what is not finite is written "nan", "inf" or "-inf", and nothing else may be a string."""


class Record(BaseModel):
    """Frozen, closed, strictly typed: a record with an unknown or missing key is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    def digest(self) -> str:
        """sha256 of the content."""
        content = json.dumps(self.model_dump(mode="json"), sort_keys=True, ensure_ascii=False, allow_nan=False)
        return hashlib.sha256(content.encode()).hexdigest()


AnyRecord = TypeVar("AnyRecord", bound=Record)


def write_record(path: Path, record: Record) -> None:
    """Write atomically: a reader sees the old file or the whole new one. Raises GateError where the disk refuses."""
    try:
        write_json(path, record.model_dump(mode="json"))
    except OSError as error:
        raise GateError(
            f"{path}: not written: {error.strerror or error}",
            "check the folder, its permissions and the free space; a file that was there is untouched",
        ) from error


def read_record(path: Path, kind: type[AnyRecord]) -> AnyRecord:
    """Read one record. Raises GateError naming the file, the key and the reason."""
    try:
        text = path.read_text(encoding="utf-8")
        json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_duplicates)
        return kind.model_validate_json(text)
    except OSError as error:
        raise GateError(
            f"{path}: not readable: {error.strerror or error}", "run the stage that writes it again"
        ) from error
    except ValidationError as error:
        raise GateError(f"{path}: not a valid {kind.__name__}: {_first_problems(error)}", _DAMAGED) from None
    except (ValueError, RecursionError) as error:
        raise GateError(f"{path}: not valid JSON: {error}", _DAMAGED) from None


def nonfinite_places(content: Any, place: str = "") -> Iterator[str]:
    """Where in a record (or its parts) a float is NaN or infinite, as dotted paths; named items by their name."""
    if isinstance(content, float):
        if not math.isfinite(content):
            yield f"{place} is {_write_number(content)}"
    elif isinstance(content, BaseModel):
        for key in type(content).model_fields:
            yield from nonfinite_places(getattr(content, key), f"{place}.{key}" if place else key)
    elif isinstance(content, tuple):
        for index, item in enumerate(content):
            yield from nonfinite_places(item, f"{place}.{getattr(item, 'name', index)}")


_DAMAGED = "the file is damaged or of another version: run the stage that writes it again"


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"bare {word} (not finite numbers are written as strings)")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError(f"a key appears twice among {', '.join(sorted({key for key, _ in pairs}))}")
    return content


def _first_problems(error: ValidationError, limit: int = 3) -> str:
    problems = [f"{'.'.join(map(str, item['loc'])) or 'the whole'}: {item['msg']}" for item in error.errors()]
    more = f"; and {len(problems) - limit} more" if len(problems) > limit else ""
    return "; ".join(problems[:limit]) + more
