"""YAML + preset + overrides -> NightConfig, with errors that name the key and what to write. Needs no torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from configs.errors import ConfigError
from configs.schema.metric_names import metric_problems
from configs.schema.night import NightConfig

CONFIGS = Path(__file__).resolve().parent.parent
_OCTAL = re.compile(r"[-+]?0[0-9_]+")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> NightConfig:
    """Read one night's YAML.

    `preset: NAME` at the top names a file of configs/presets whose values lie under the file's own.
    `overrides` are `key.path=value` with YAML values, laid over both; `preset=NAME` takes the place of the file's.
    Raises ConfigError naming the file, the key and the way out.
    """
    path = Path(path)
    content = _read_yaml(path)
    above: dict[str, Any] = {}
    for override in overrides:
        above = merge(above, _parse_override(override))
    preset = content.pop("preset", None)
    preset = above.pop("preset", preset)
    if preset is not None:
        content = merge(_read_preset(path, preset), content)
    content = merge(content, above)
    try:
        config = NightConfig.model_validate(content)
    except ValidationError as error:
        raise ConfigError(explain(path, error)) from None
    # Here and not in the schema: a stored night stays readable when a metric is renamed.
    problems = metric_problems(config)
    if problems:
        raise ConfigError(_numbered(path, problems))
    return config


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Lay `above` over `below`, mapping by mapping; lists and scalars are replaced whole."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def preset_names() -> list[str]:
    """Names that `preset:` may take."""
    return sorted(file.stem for file in (CONFIGS / "presets").glob("*.yaml"))


def _refuse_other_bases(node: yaml.Node) -> None:
    """YAML 1.1 reads 1:30 as 90 and 010 as 8, which nobody who writes a limit means."""
    is_number = isinstance(node, yaml.ScalarNode) and node.tag.endswith((":int", ":float"))
    if is_number and (":" in node.value or _OCTAL.fullmatch(node.value)):
        told = f"{_short(node.value)} would be read in base {60 if ':' in node.value else 8}"
        way_out = "write the number in tens, or a text in quotes"
        raise yaml.constructor.ConstructorError(None, None, f"{told}; {way_out}", node.start_mark)


class _OneOfEach(yaml.SafeLoader):
    """YAML in which a key that stands twice is refused: the second would silently replace the first."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """A value that has the form of a type and is none of it (a date 2026-13-45) is refused with its place."""
        _refuse_other_bases(node)
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, AttributeError, OverflowError) as error:
            kind, why = node.tag.rpartition(":")[2], f" ({error})" if isinstance(error, ValueError) else ""
            told = f"{_short(str(node.value))} is read as {kind} and is none{why}; for a text, write it in quotes"
            raise yaml.constructor.ConstructorError(None, None, told, node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue  # a list as a key, which the schema refuses in its own words
            key = key_node.value
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice; keep one", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _parsed(text: str) -> Any:
    """The one document in `text`. Raises yaml.YAMLError with the place of whatever is wrong, and nothing else."""
    loader = _OneOfEach(text)
    try:
        return loader.get_single_data()
    except RecursionError:
        raise yaml.YAMLError(f"nested too deep, line {loader.line + 1}, column {loader.column + 1}") from None
    finally:
        loader.dispose()


def _read_yaml(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise ConfigError(f"{path}: a folder, not a config file", _which_file(path))
    if not path.is_file():
        raise ConfigError(
            f"{path}: no such config file", "give the path of a night's YAML, e.g. configs/quickstart.yaml"
        )
    try:
        content = _parsed(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}: not UTF-8: byte 0x{error.object[error.start]:02x} in line {line}",
            "save the file as UTF-8 in your editor, or: iconv -f latin1 -t utf-8 OLD > NEW",
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not readable as YAML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}", "check its permissions") from None
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path}: the file must be a mapping of sections", "see configs/quickstart.yaml for the shape"
        )
    return content


def _which_file(folder: Path) -> str:
    inside = sorted(file.name for file in folder.glob("*.y*ml"))
    if not inside:
        return "give the path of a night's YAML, e.g. configs/quickstart.yaml"
    return f"name one file of it, e.g. {folder / inside[0]} (there is {', '.join(inside[:9])})"


def _read_preset(path: Path, preset: Any) -> dict[str, Any]:
    if preset not in preset_names():
        raise ConfigError(f"{path}: preset: {preset!r} does not exist", f"write one of {', '.join(preset_names())}")
    return _read_yaml(CONFIGS / "presets" / f"{preset}.yaml")


def _parse_override(override: str) -> dict[str, Any]:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"override {override!r} is not key.path=value", "write e.g. ppo.actor_lr=1e-5")
    try:
        value = _parsed(text)
    except yaml.YAMLError as error:
        why = getattr(error, "problem", None) or error
        raise ConfigError(f"override {_short(override)}: the value is not YAML: {why}") from None
    # YAML 1.1 reads 1e-5 as a string; a number was meant.
    if isinstance(value, str):
        value = _as_number(value)
    for part in reversed(key.strip().split(".")):
        value = {part: value}
    return dict(value)


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}...")


def _as_number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def explain(path: str | Path, error: ValidationError) -> str:
    """One line an error: file, key, what is wrong, what to write."""
    return _numbered(path, [
        f"{_key(item['loc'])}: {_sentence(item['type'], item['loc'], item['msg'], item.get('input'))}"
        for item in error.errors()
    ])  # fmt: skip


def _numbered(path: str | Path, problems: Sequence[str]) -> str:
    head = f"{path}: {len(problems)} problem(s); nothing has run"
    return "\n".join([head, *(f"  {problem}" for problem in problems)])


def _key(location: tuple[int | str, ...]) -> str:
    """`gates.rules[3].metric`, as a person would write it."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return "".join(parts).lstrip(".") or "(whole file)"


def _sentence(kind: str, location: tuple[int | str, ...], message: str, given: Any) -> str:
    if kind == "extra_forbidden":
        known = sorted(_known_keys(location[:-1]))
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        guess = f"; did you mean `{close[0]}`?" if close else ""
        return f"unknown key{guess} Known here: {', '.join(known)}"
    if kind == "missing":
        return "this key is required"
    message = message.removeprefix("Value error, ")
    return message if isinstance(given, dict) else f"{message} (given: {given!r})"


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    """Fields of the section at `location`, found by walking the models' annotations."""
    model: type[BaseModel] | None = NightConfig
    for part in location:
        if model is None or not isinstance(part, str) or part not in model.model_fields:
            continue
        model = _section_of(model.model_fields[part].annotation)
    return list(model.model_fields) if model is not None else []


def _section_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in get_args(annotation):
        found = _section_of(inner)
        if found is not None:
            return found
    return None
